#include <lockstep/devices/keep_freed_memory.hpp>

#include <cstddef>
#include <cstdint>
#include <cstdlib>  // defines __GLIBC__
#include <limits>

#ifdef __GLIBC__
#include <c10/core/CPUAllocator.h>
#include <c10/core/alignment.h>
#include <c10/util/Exception.h>
#include <c10/util/env.h>
#include <malloc.h>
#include <sys/mman.h>

#include <array>
#include <atomic>
#endif

namespace lockstep {

#ifdef __GLIBC__
namespace {

// Asks Linux for huge pages where tensors lie. A layer's weights are more pages of 4 kB than a core's table of
// addresses holds, and rows of tiles are far apart. Where transparent_hugepage is "always", Linux does this by itself.
class HugePages {
 public:
  // Give it what malloc gave. glibc gives blocks of 32 MB and more, with the 16 bytes in front, a mapping each. All
  // others lie in heaps, which begin at multiples of 64 MB, or in the process's own heap. Around blocks of another
  // malloc, neighbours may get huge pages too, which changes no value.
  void ask_for(void* block, size_t bytes) {
    const auto place = reinterpret_cast<uintptr_t>(block);
    if (bytes + 16 >= kHeap / 2) {
      advise(block, place % kSmallPage, bytes);
    } else if (auto& seen = seen_[place / kPage % kSeen]; seen.load() != place / kPage) {
      seen = place / kPage;
      advise(block, place % kHeap, kHeap - place % kHeap);  // the rest of the heap too, before it is used
    }
  }

 private:
  static constexpr size_t kSmallPage = 4 << 10, kPage = 2 << 20, kHeap = 64 << 20, kSeen = 4096;

  static void advise(void* block, size_t before, size_t bytes) {
    madvise(static_cast<char*>(block) - before, before + bytes, MADV_HUGEPAGE);  // fails where the kernel has none
  }

  std::array<std::atomic<uintptr_t>, kSeen> seen_{};  // the page last seen at each place: those 8 GB apart share one
};

// Takes the CPU's tensors by malloc. LibTorch takes them by posix_memalign, which cuts every block out of a larger one
// and frees the rest. So a freed block does not fit the next tensor of its size, and a step wanders through memory that
// is in no cache. A pointer to the whole block lies in front of the tensor.
class TensorsByMalloc : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device cpu(c10::DeviceType::CPU);
    if (bytes == 0) return {nullptr, nullptr, &give_back, cpu};
    void* const block = bytes < kTooMany ? std::malloc(bytes + c10::gAlignment) : nullptr;
    if (block == nullptr) {
      c10::profiledCPUMemoryReporter().OutOfMemory(bytes);
      TORCH_CHECK_WITH(OutOfMemoryError, false, "you tried to allocate ", bytes, " bytes for a tensor");
    }
    huge_pages_.ask_for(block, bytes + c10::gAlignment);
    void* const data = aligned_behind(block);
    static_cast<void**>(data)[-1] = block;
    c10::profiledCPUMemoryReporter().New(data, bytes);
    return {data, data, &give_back, cpu};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }

  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }

 private:
  static constexpr size_t kTooMany = std::numeric_limits<ptrdiff_t>::max() - c10::gAlignment;

  static_assert(c10::gAlignment >= 2 * alignof(std::max_align_t));  // leaves room for the pointer
  static void* aligned_behind(void* block) {
    char* const end = static_cast<char*>(block) + c10::gAlignment;
    return end - reinterpret_cast<uintptr_t>(end) % c10::gAlignment;
  }

  static void give_back(void* data) {
    if (data == nullptr) return;
    c10::profiledCPUMemoryReporter().Delete(data);
    std::free(static_cast<void**>(data)[-1]);
  }

  HugePages huge_pages_;
};

}  // namespace
#endif

void keep_freed_memory() {
#ifdef __GLIBC__
  mallopt(M_MMAP_THRESHOLD, 32 << 20);  // the most that mallopt takes
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
  // Threads' memory comes in heaps of at most 64 MB. glibc unmaps a heap that is all free, unless this much must stay.
  mallopt(M_TOP_PAD, 64 << 20);
  static const bool is_set = [] {
    // This variable has LibTorch take large tensors in huge pages by itself.
    const bool by_libtorch = c10::utils::check_env("THP_MEM_ALLOC_ENABLE").value_or(false);
    if (by_libtorch || c10::GetCPUAllocator() != c10::GetDefaultCPUAllocator()) return false;  // the program's own
    c10::SetCPUAllocator(new TensorsByMalloc);                                                 // outlives all tensors
    return true;
  }();
  static_cast<void>(is_set);
#endif
}

}  // namespace lockstep

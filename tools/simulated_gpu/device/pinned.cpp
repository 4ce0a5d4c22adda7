#include "pinned.hpp"

#include <cstdlib>
#include <map>
#include <mutex>

namespace simulated {
namespace {

struct Pieces {
  std::mutex mutex;
  std::map<const char*, size_t> sizes;  // sizes by address
};

Pieces& pieces() {
  static auto* const pieces = new Pieces;
  return *pieces;
}

class PinnedAllocator final : public at::Allocator {
 public:
  at::DataPtr allocate(size_t bytes) override {
    void* const data = std::malloc(std::max<size_t>(bytes, 1));
    TORCH_CHECK(data != nullptr, "no pinned memory");
    const std::lock_guard lock(pieces().mutex);
    pieces().sizes[static_cast<char*>(data)] = bytes;
    return {data, data, &release, c10::Device(at::kCPU)};
  }
  at::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }

 private:
  static void release(void* data) {
    const std::lock_guard lock(pieces().mutex);
    pieces().sizes.erase(static_cast<char*>(data));
    std::free(data);
  }
};

}  // namespace

at::Allocator* pinned_allocator() {
  static auto* const allocator = new PinnedAllocator;
  return allocator;
}

bool is_pinned(const void* data) {
  const std::lock_guard lock(pieces().mutex);
  const auto* const byte = static_cast<const char*>(data);
  const auto after = pieces().sizes.upper_bound(byte);
  return after != pieces().sizes.begin() && byte < std::prev(after)->first + std::prev(after)->second;
}

}  // namespace simulated

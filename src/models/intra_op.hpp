// in_parallel, for_each_…: run a loop over LibTorch's intra-op threads. RowRanges: gives the ranges of rows for
// kernels.
//
// at::parallel_for is a template: compiled without OpenMP, as lockstep is, it has one thread. This loop was compiled in
// LibTorch, so it takes LibTorch's threads of whatever kind. Costs some microseconds on several threads.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/TensorIterator.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstdint>

namespace lockstep {

// ThreadSanitizer does not see how LibTorch's threads wait for each other.
#if defined(__SANITIZE_THREAD__)  // GCC
inline constexpr bool kHasIntraOpThreads = false;
#elif defined(__has_feature)  // clang
inline constexpr bool kHasIntraOpThreads = !__has_feature(thread_sanitizer);
#else
inline constexpr bool kHasIntraOpThreads = true;
#endif

// Calls body(begin, end) for ranges that make up [0, count), on at::get_num_threads() threads at most. Throws as body
// does.
template <class Body>
void in_parallel(int64_t count, const Body& body) {
  if (count == 0) return;
  if (!kHasIntraOpThreads || count == 1 || at::get_num_threads() == 1) return body(0, count);
  const at::Tensor numbers = at::empty({count}, at::kByte);  // only its addresses matter: one byte each
  const char* const first = static_cast<const char*>(numbers.const_data_ptr());
  auto loop = at::TensorIteratorConfig().add_output(numbers).resize_outputs(false).check_all_same_dtype(false).build();
  loop.for_each(
      [&](char** at, const int64_t*, int64_t size) {
        const int64_t begin = at[0] - first;
        body(begin, begin + size);
      },
      /*grain_size=*/1);
}

// Calls body(i) for i in [0, count), as in_parallel does.
template <class Body>
void for_each_in_parallel(int64_t count, const Body& body) {
  in_parallel(count, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) body(i);
  });
}

// Calls body(i, scratch), as in_parallel does. Each thread's scratch has `floats` values, and begins with a cache line.
template <class Body>
void for_each_with_scratch(int64_t count, int64_t floats, const Body& body) {
  in_parallel(count, [&](int64_t begin, int64_t end) {
    const at::Tensor scratch = at::empty({floats}, at::kFloat);
    for (int64_t i = begin; i < end; ++i) body(i, scratch.mutable_data_ptr<float>());
  });
}

// Divides rows of `size` values into ranges of at most `most` rows. Kernels compute a range at a time.
struct RowRanges {
  int64_t rows, size, most;

  int64_t count() const { return at::divup(rows, most); }
  int64_t rows_in(int64_t range) const { return std::min(most, rows - range * most); }
  int64_t first_value(int64_t range) const { return range * most * size; }
};

}  // namespace lockstep

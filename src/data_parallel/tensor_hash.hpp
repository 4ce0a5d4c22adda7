// tensor_hash makes a number of a tensor's values, to the bit, for ranks that compare what they have.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace lockstep {

// Equal values of one type give equal numbers, however they lie in memory. It reads some gigabytes per second; the host
// waits for a GPU. It is thread-safe.
int64_t tensor_hash(const at::Tensor& tensor);

}  // namespace lockstep

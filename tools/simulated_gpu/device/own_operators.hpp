// Operators that every device brings itself: memory, views of it, and copies.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace simulated {

at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> type,
                         std::optional<at::Layout> layout, std::optional<at::Device> device,
                         std::optional<bool> pin_memory);

}  // namespace simulated

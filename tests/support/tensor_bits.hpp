// For tests that compare networks to the bit: a text for each tensor, with a number made from its bits.
#pragma once

#include <torch/nn/module.h>

#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

using TensorBits = std::vector<std::string>;

inline TensorBits tensor_bits(const torch::nn::Module& module) {
  TensorBits bits;
  const auto add = [&](const std::string& name, const at::Tensor& tensor) {
    const at::Tensor here = tensor.detach().cpu().contiguous();
    const std::string_view bytes(static_cast<const char*>(here.data_ptr()), here.nbytes());
    bits.push_back(name + " " + std::to_string(std::hash<std::string_view>()(bytes)));
  };
  for (const auto& item : module.named_parameters()) add(item.key(), item.value());
  for (const auto& item : module.named_buffers()) add(item.key(), item.value());
  return bits;
}

}  // namespace lockstep

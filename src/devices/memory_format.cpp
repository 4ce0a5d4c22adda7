#include <lockstep/devices/memory_format.hpp>

#include <vector>

namespace lockstep {

void set_memory_format(torch::nn::Module& module, at::MemoryFormat format) {
  std::vector<at::Tensor> tensors = module.parameters();
  const auto buffers = module.buffers();
  tensors.insert(tensors.end(), buffers.begin(), buffers.end());
  for (auto& tensor : tensors) {
    if (tensor.dim() == 4) tensor.set_data(tensor.detach().contiguous(format));
  }
}

}  // namespace lockstep

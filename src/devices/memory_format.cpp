#include <c10/core/MemoryFormat.h>
#include <lockstep/devices/memory_format.hpp>

#include <vector>

namespace lockstep {
namespace {

// contiguous() keeps the strides of a tensor that has one channel, or one pixel: its memory has the order of both
// formats. But a convolution chooses the format of its results by the weight's strides, and all later layers would
// convert these results.
at::Tensor with_strides_of(at::MemoryFormat format, const at::Tensor& tensor) {
  const at::Tensor values = tensor.contiguous(format);
  return format == at::MemoryFormat::ChannelsLast
             ? values.as_strided(values.sizes(), c10::get_channels_last_strides_2d(values.sizes()))
             : values.view({-1}).view(values.sizes());
}

}  // namespace

void set_memory_format(torch::nn::Module& module, at::MemoryFormat format) {
  std::vector<at::Tensor> tensors = module.parameters();
  const auto buffers = module.buffers();
  tensors.insert(tensors.end(), buffers.begin(), buffers.end());
  for (auto& tensor : tensors) {
    if (tensor.dim() == 4) tensor.set_data(with_strides_of(format, tensor.detach()));
  }
}

}  // namespace lockstep

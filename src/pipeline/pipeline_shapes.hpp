// Finds the shapes and types of tensors between the stages of a pipeline, by sending zeros through all stages.
#pragma once

#include <ATen/core/Tensor.h>
#include <lockstep/ranks/rank.hpp>

#include "pipeline_stage.hpp"

#include <cstdint>
#include <string>
#include <vector>

namespace lockstep {

struct SampleShape {
  at::ScalarType type = at::ScalarType::Undefined;
  std::vector<int64_t> sizes = {};  // the sizes of one sample
  at::MemoryFormat format = at::MemoryFormat::Contiguous;

  bool operator==(const SampleShape&) const = default;
  at::Tensor empty(int64_t samples, const c10::Device& device) const;
  std::string text() const;  // gives "float [n, 3, 2]"
};

// `x` holds samples along its first dimension.
SampleShape sample_shape(const at::Tensor& x);

// Returns shapes: element s is the input shape of stage s; the last element is the network's output shape. A rank fills
// in the shapes that its own stages take and give, and the last element; the others are empty. Call it on all ranks,
// with the same `input`. `stages` are this rank's stages, `count` is the number of all. It runs in eval mode and
// without gradients. Throws Error for a layer that cannot take its input, and for a stage whose output is no
// floating-point tensor with the samples first.
std::vector<SampleShape> dry_run_shapes(Rank& rank, std::vector<PipelineStage>& stages, int count,
                                        const SampleShape& input);

}  // namespace lockstep

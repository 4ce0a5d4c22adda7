// What crosses between the stages of a pipeline: shapes and types, found out by sending zeros through all of them.
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
  std::vector<int64_t> sizes = {};  // of one sample

  bool operator==(const SampleShape&) const = default;
  at::Tensor empty(int64_t samples, const c10::Device& device) const;
  std::string text() const;  // "float [n, 3, 2]"
};

// `x` holds samples along its first dimension.
SampleShape sample_shape(const at::Tensor& x);

// Element s is what stage s takes, and the last one what the net gives: on every rank what its own stages take and give
// and the last one, the others empty. All ranks must call it with the same `input`; `stages` are this rank's, of
// `count` in all. In eval mode and without gradients. Throws Error: a layer that cannot take what comes to it; a stage
// whose output is no tensor of floating point whose first dimension is the samples.
std::vector<SampleShape> dry_run_shapes(Rank& rank, std::vector<PipelineStage>& stages, int count,
                                        const SampleShape& input);

}  // namespace lockstep

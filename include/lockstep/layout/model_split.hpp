// ModelSplit: how a network is split over the ranks of a run: by data, by layers, by channels, or by several of them.
//
// A plain value without LibTorch: what a user says, a plan holds (plan.hpp) and SplitModel carries out. Thread-safe.
#pragma once

#include <lockstep/layout/mesh_shape.hpp>
#include <lockstep/layout/pipeline_schedule.hpp>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

// How tensor parallel ranks cut layers, see ShardRule: by their output channels, or by output and input in turns.
enum class TensorRule { channels, alternating };

// "channels", "alternating". And back; throws Error that names what there is.
std::string_view to_string(TensorRule rule);
TensorRule tensor_rule_from(std::string_view name);

struct ModelSplit {
  MeshShape mesh = {};  // its product is the number of ranks

  // Of the pipeline axis:
  Schedule schedule = Schedule::one_f_one_b;
  int stages_per_rank = 1;         // more than one only with Schedule::interleaved
  int microbatches = 1;            // of the part of a batch that one pipeline has
  bool recompute = false;          // activations in backward, instead of keeping them
  std::vector<int64_t> cuts = {};  // the first layers of stages 1, 2, …; empty: stages of nearly as many layers each

  TensorRule tensor_rule = TensorRule::channels;  // of the tensor axis

  int stages() const { return mesh.pipeline * stages_per_rank; }
  bool operator==(const ModelSplit&) const = default;
};

// "2 x 2 x 1 (data x pipeline x tensor), 1f1b, 4 microbatches, cuts at 3": all that shapes a run's steps.
std::string to_string(const ModelSplit& split);

// Throws Error, which says what would fit, unless a net of `layers` layers can be split so: a number below 1, several
// stages per rank without the interleaved schedule, more stages than layers, cuts that are not as many as the stages
// need, do not ascend or do not lie within the layers.
void check_split(const ModelSplit& split, int64_t layers);

}  // namespace lockstep

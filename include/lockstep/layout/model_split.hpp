// ModelSplit: how a network is split over the ranks of a run: by data, by layers, by channels, or by several of them.
//
// A plain value without LibTorch. A user gives it, a plan holds it (plan.hpp), and SplitModel carries it out.
// Thread-safe.
#pragma once

#include <lockstep/layout/pipeline_schedule.hpp>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

// How many ranks stand along each axis of a mesh. The ranks themselves: mesh.hpp.
struct MeshShape {
  int data = 1;
  int pipeline = 1;
  int tensor = 1;

  int size() const { return data * pipeline * tensor; }
  bool operator==(const MeshShape&) const = default;
};

// "2 x 1 x 4 (data x pipeline x tensor)".
std::string to_string(const MeshShape& shape);

// All shapes with `ranks` ranks, those with most data first: for 4 they are 4x1x1, 2x2x1, 2x1x2, 1x4x1, 1x2x2, 1x1x4.
// Throws Error unless ranks >= 1.
std::vector<MeshShape> mesh_shapes(int ranks);

// Throws Error unless the shape's product is `ranks`; the text says which shapes would fit.
void check_mesh(const MeshShape& shape, int ranks);

// How tensor parallel ranks cut layers: by output channels, or by output and input in turns (see ShardRule).
enum class TensorRule { channels, alternating };

// "channels" or "alternating". tensor_rule_from converts back. It throws Error, which lists the names, for any other
// text.
std::string_view to_string(TensorRule rule);
TensorRule tensor_rule_from(std::string_view name);

struct ModelSplit {
  MeshShape mesh = {};  // its product is the number of ranks

  // The pipeline axis:
  PipelineSchedule schedule = PipelineSchedule::one_f_one_b;
  int stages_per_rank = 1;         // more than one only with PipelineSchedule::interleaved
  int microbatches = 1;            // into which one pipeline's part of a batch is cut
  bool recompute = false;          // true: activations are computed again in backward instead of kept
  std::vector<int64_t> cuts = {};  // the first layers of stages 1, 2, …; empty: stages of nearly as many layers each

  TensorRule tensor_rule = TensorRule::channels;  // the tensor axis

  int stages() const { return mesh.pipeline * stages_per_rank; }
  bool operator==(const ModelSplit&) const = default;
};

// "2 x 2 x 1 (data x pipeline x tensor), 1f1b, 4 microbatches, cuts at 3": all that shapes a run's steps.
std::string to_string(const ModelSplit& split);

// Throws Error, which says what would fit, if a net of `layers` layers cannot be split like this: a number below 1,
// several stages per rank without the interleaved schedule, more stages than layers, or cuts that are too few or too
// many, do not ascend, or do not lie within the layers.
void check_split(const ModelSplit& split, int64_t layers);

}  // namespace lockstep

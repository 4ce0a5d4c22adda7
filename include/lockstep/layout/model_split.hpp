// ModelSplit: says how a network is split over the ranks of a run: by data, layers, channels, or several of these.
//
// It is a plain value without LibTorch, and thread-safe. A user or a plan (plan.hpp) gives it; SplitModel carries it
// out.
#pragma once

#include <lockstep/layout/pipeline_schedule.hpp>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

// Gives the number of ranks along each axis of a mesh. See mesh.hpp for the ranks themselves.
struct MeshShape {
  int data = 1;
  int pipeline = 1;
  int tensor = 1;

  int size() const { return data * pipeline * tensor; }
  bool operator==(const MeshShape&) const = default;
};

// Describes the shape: "2 x 1 x 4 (data x pipeline x tensor)".
std::string to_string(const MeshShape& shape);

// Returns all shapes with `ranks` ranks, most data ranks first: for 4 they are 4x1x1, 2x2x1, 2x1x2, 1x4x1, 1x2x2,
// 1x1x4. Throws Error unless ranks >= 1.
std::vector<MeshShape> mesh_shapes(int ranks);

// Throws Error unless the shape's product is `ranks`; the text says which shapes would fit.
void check_mesh(const MeshShape& shape, int ranks);

// Says how tensor parallel ranks cut layers: by output channels, or convolutions by output and input in turns.
enum class TensorRule { channels, alternating };

// Returns the names "channels" and "alternating". tensor_rule_from converts back. For any other text it throws Error,
// whose text lists the names.
std::string_view to_string(TensorRule rule);
TensorRule tensor_rule_from(std::string_view name);

struct ModelSplit {
  MeshShape mesh = {};  // its product is the number of ranks

  // The next fields are about the pipeline axis.
  PipelineSchedule schedule = PipelineSchedule::one_f_one_b;
  int stages_per_rank = 1;  // more than one only with PipelineSchedule::interleaved
  // The number of microbatches, nearly equal in size, into which one pipeline's part of a batch is cut. A smaller part
  // is cut into single samples. With Batch::grain the grains are the microbatches, and this is ignored.
  int microbatches = 1;
  // If true, a stage keeps only its input until backward, which computes the forward again. This takes less memory and
  // more time. Use no layers that draw random numbers but lockstep::Dropout, which drops the same again.
  bool recompute = false;
  std::vector<int64_t> cuts = {};  // the first layers of stages 1, 2, …; empty: each stage gets nearly as many layers

  TensorRule tensor_rule = TensorRule::channels;  // the rule of the tensor axis

  int stages() const { return mesh.pipeline * stages_per_rank; }
  bool operator==(const ModelSplit&) const = default;
};

// Describes all of the split that shapes a run's steps: "2 x 2 x 1 (data x pipeline x tensor), 1f1b, 4 microbatches,
// cuts at 3".
std::string to_string(const ModelSplit& split);

// Throws Error, which says what would fit, if a net of `layers` layers cannot be split like this: a number is below 1;
// there are several stages per rank without the interleaved schedule, or more stages than layers; cuts are too few or
// too many, do not ascend, or do not lie within the layers.
void check_split(const ModelSplit& split, int64_t layers);

}  // namespace lockstep

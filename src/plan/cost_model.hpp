// CostModel: computes the cost of a net split over a mesh from a profile, by the formulas of docs/plan.md.
//
// It uses no LibTorch, and has no state beyond the arguments. Keep these alive as long as the CostModel.
#pragma once

#include <lockstep/layout/model_split.hpp>
#include <lockstep/plan/plan.hpp>

#include <cstdint>
#include <functional>
#include <vector>

#include "partition.hpp"
#include "simulate.hpp"

namespace lockstep {

class CostModel {
 public:
  // Throws Error for a mesh that is larger than the cluster, or for which the model was not profiled.
  CostModel(const ModelProfile& profile, const Cluster& cluster, const TrainingCost& training, const MeshShape& mesh,
            int64_t batch_size);

  // Returns the number of samples of the largest part of a batch that one pipeline gets.
  int64_t part() const { return part_; }

  // Returns the input of fitting_stages(); the split's own cuts do not matter. Several stages of a rank share the
  // device's memory equally. Here and below, give a split with the mesh for which this CostModel was made.
  Partition partition(const ModelSplit& split) const;

  // Predicts the cost. Give a split whose cuts make its stages.
  Prediction predict(const ModelSplit& split) const;

  // Returns the memory of the smallest of the devices that hold rank `p` of the pipeline axis; 0: no limit.
  double memory_limit(int p) const { return columns_[static_cast<size_t>(p)].memory_bytes; }

 private:
  // Describes the devices beside each other on the data and tensor axes. They do the same, and count as one.
  struct Column {
    double speed = 0;         // the speed of the slowest device
    double memory_bytes = 0;  // the bytes of the smallest device; 0: no limit
    int node = 0;             // the node of the first device
  };
  // Describes stage s: the layers, and their sums.
  struct Stage {
    int64_t first, end;
    double parameter_bytes = 0, buffer_bytes = 0;
    double saved_bytes = 0;  // bytes per sample
    double input_bytes = 0;  // bytes per sample; 0 for the first stage, since the batch itself is counted elsewhere
  };

  // Holds a split whose costs are counted.
  struct Candidate {
    const ModelSplit& split;
    std::vector<Stage> stages;
    double samples;  // the number of samples of a microbatch
  };

  int device(int data, int pipeline, int tensor) const {
    return (data * mesh_.pipeline + pipeline) * mesh_.tensor + tensor;
  }
  bool crosses_nodes(const std::function<int(int data, int pipeline, int tensor)>& neighbour) const;
  double seconds(const LayerMessage& message, double samples) const;
  double seconds(const std::vector<LayerMessage>& messages, double samples) const;
  double sent_bytes(const std::vector<LayerMessage>& messages, double samples) const;
  std::vector<Stage> stages(const std::vector<int64_t>& cuts) const;
  PipelineRun::Stage run_of(const Stage& stage, int p, double samples, bool recompute) const;
  double workspace_bytes(const Stage& stage, double samples) const;
  // These four are about rank p of the pipeline axis, or its stages.
  double live_bytes(const Candidate& candidate, int p) const;
  double memory_bytes(const Candidate& candidate, int p) const;
  double bytes_sent(const Candidate& candidate, int p) const;
  double exposed_allreduce(double bytes, double backward) const;

  const ModelProfile& profile_;
  const Cluster& cluster_;
  const TrainingCost training_;
  const MeshShape mesh_;
  const std::vector<LayerProfile>& layers_;  // the slice's layers, if there is a tensor axis
  const int64_t part_;
  std::vector<Column> columns_;     // the columns, one per rank of the pipeline axis
  Links data_, pipeline_, tensor_;  // the links of each axis
  int copies_ = 1;                  // the number of pipelines that share a node
};

// Checks a plan before its net is known. Throws Error, which says what would fit, for a number below 1, for several
// stages per rank without the interleaved schedule, and for more stages than `layers`. It also throws for cuts that are
// fewer or more than the stages need, do not ascend, or do not lie within the layers.
void check_plan_shape(const Plan& plan, int64_t layers);

}  // namespace lockstep

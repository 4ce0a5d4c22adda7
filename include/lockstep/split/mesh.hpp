// Mesh arranges the ranks of a run as a block of three axes, so that ways to split a network can be combined.
//
// Ranks along the data axis hold replicas and train different samples. Along the pipeline axis they hold different
// layers, along the tensor axis different channels of the same layers. Use a Mesh on its rank's thread only. It makes a
// group (Rank::group) for each axis that has several ranks, but not all of them; on GPUs also for one that has all.
#pragma once

#include <lockstep/layout/model_split.hpp>
#include <lockstep/ranks/rank.hpp>

namespace lockstep {

class Mesh {
 public:
  // Make it on all ranks, with the same shape. Rank i stands at tensor coordinate i % tensor, pipeline coordinate i /
  // tensor % pipeline and data coordinate i / (tensor * pipeline). So ranks that talk most lie next to each other, as
  // in Megatron-LM (Narayanan et al. 2021, section 3). Throws Error as check_mesh does.
  Mesh(Rank& rank, const MeshShape& shape);

  const MeshShape& shape() const { return shape_; }

  // Gives the ranks that share this rank's other two coordinates, numbered along the axis of that name.
  Rank& data() { return data_; }
  Rank& pipeline() { return pipeline_; }
  Rank& tensor() { return tensor_; }

 private:
  MeshShape shape_;
  Rank data_;
  Rank pipeline_;
  Rank tensor_;
};

}  // namespace lockstep

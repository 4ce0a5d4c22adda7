#include <lockstep/split/mesh.hpp>

#include "ranks/rank_place.hpp"

namespace lockstep {
namespace {

MeshShape checked(const MeshShape& shape, const Rank& rank) {
  check_mesh(shape, rank.world_size());
  return shape;
}

// Groups the ranks with this color, which all compute alike. An axis of length 1 needs nobody else. On GPUs one that
// has all ranks is a group too: its calls are on other streams, which one communicator would put in a row.
Rank axis(Rank& rank, int length, int color) {
  if (length == 1) return comm::RankPlace::alone(rank);
  if (length == rank.world_size() && rank.device().is_cpu()) return rank;
  return rank.group(color);
}

}  // namespace

Mesh::Mesh(Rank& rank, const MeshShape& shape)
    : shape_(checked(shape, rank)),
      data_(axis(rank, shape.data, rank.index() % (shape.tensor * shape.pipeline))),
      pipeline_(axis(rank, shape.pipeline,
                     rank.index() / (shape.tensor * shape.pipeline) * shape.tensor + rank.index() % shape.tensor)),
      tensor_(axis(rank, shape.tensor, rank.index() / shape.tensor)) {}

}  // namespace lockstep

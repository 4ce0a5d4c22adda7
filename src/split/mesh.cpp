#include <lockstep/split/mesh.hpp>

namespace lockstep {
namespace {

MeshShape checked(const MeshShape& shape, const Rank& rank) {
  check_mesh(shape, rank.world_size());
  return shape;
}

}  // namespace

Mesh::Mesh(Rank& rank, const MeshShape& shape)
    : shape_(checked(shape, rank)),
      data_(rank.group(rank.index() % (shape.tensor * shape.pipeline))),
      pipeline_(
          rank.group(rank.index() / (shape.tensor * shape.pipeline) * shape.tensor + rank.index() % shape.tensor)),
      tensor_(rank.group(rank.index() / shape.tensor)) {}

}  // namespace lockstep

// MeshShape: how many ranks stand along each axis of a mesh. The ranks themselves: mesh.hpp.
//
// Plain values, without LibTorch; thread-safe.
#pragma once

#include <string>
#include <vector>

namespace lockstep {

struct MeshShape {
  int data = 1;
  int pipeline = 1;
  int tensor = 1;

  int size() const { return data * pipeline * tensor; }
  bool operator==(const MeshShape&) const = default;
};

// "2 x 1 x 4 (data x pipeline x tensor)".
std::string to_string(const MeshShape& shape);

// Every shape of `ranks` ranks, data first: for 4 they are 4x1x1, 2x2x1, 2x1x2, 1x4x1, 1x2x2, 1x1x4. Throws Error
// unless ranks >= 1.
std::vector<MeshShape> mesh_shapes(int ranks);

// Throws Error unless the shape's product is `ranks`; the text says which shapes would fit.
void check_mesh(const MeshShape& shape, int ranks);

}  // namespace lockstep

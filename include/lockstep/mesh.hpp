// MeshShape: how many ranks an arrangement data x pipeline x tensor has along each axis.
#pragma once

namespace lockstep {

struct MeshShape {
  int data = 1;
  int pipeline = 1;
  int tensor = 1;

  bool operator==(const MeshShape&) const = default;
};

}  // namespace lockstep

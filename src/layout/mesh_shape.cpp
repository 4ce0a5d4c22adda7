#include <lockstep/base/error.hpp>
#include <lockstep/layout/mesh_shape.hpp>

namespace lockstep {

std::string to_string(const MeshShape& shape) {
  return std::to_string(shape.data) + " x " + std::to_string(shape.pipeline) + " x " + std::to_string(shape.tensor) +
         " (data x pipeline x tensor)";
}

std::vector<MeshShape> mesh_shapes(int ranks) {
  if (ranks < 1) throw Error("a mesh of " + std::to_string(ranks) + " ranks; it needs at least one");
  std::vector<MeshShape> shapes;
  for (int data = ranks; data >= 1; --data) {
    if (ranks % data != 0) continue;
    for (int pipeline = ranks / data; pipeline >= 1; --pipeline) {
      if (ranks / data % pipeline == 0) shapes.push_back({data, pipeline, ranks / data / pipeline});
    }
  }
  return shapes;
}

void check_mesh(const MeshShape& shape, int ranks) {
  const bool positive = shape.data >= 1 && shape.pipeline >= 1 && shape.tensor >= 1;
  if (positive && shape.size() == ranks) return;
  std::string fitting;
  for (const auto& other : mesh_shapes(ranks)) {
    const std::string text = to_string(other);
    fitting += (fitting.empty() ? "" : ", ") + text.substr(0, text.find(" ("));
  }
  throw Error("a mesh of " + to_string(shape) + " does not fit " + std::to_string(ranks) +
              (ranks == 1 ? " device" : " devices") + "; what would: " + fitting);
}

}  // namespace lockstep

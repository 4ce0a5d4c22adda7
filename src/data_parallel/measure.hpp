// Measures means over a data set, whose names errors give. evaluate() and the trainer use it.
#pragma once

#include <lockstep/data_parallel/evaluate_criteria.hpp>

#include <string>
#include <vector>

namespace lockstep {

struct Measure {
  std::string name;    // name in errors: "the metric "iou""
  std::string option;  // option of ErrorData that gave it
  Criterion of;
};

// Does what evaluate() says.
std::vector<double> measure(const std::function<at::Tensor(const Batch& batch)>& forward, const Samples& samples,
                            const std::vector<Measure>& measures, Rank& rank, int64_t batch_size, int64_t grain);

}  // namespace lockstep

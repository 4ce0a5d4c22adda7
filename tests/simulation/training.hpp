// What each rank of a simulated job does: it trains a net of some hundred parameters, and says what it has seen.
#pragma once

#include <lockstep/data/data.hpp>
#include <lockstep/ranks/rank.hpp>

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace lockstep::simulation {

struct Steps {
  std::vector<uint64_t> weights;              // after each step, a digest
  std::vector<std::vector<int64_t>> samples;  // of each complete step
};

constexpr int64_t kBatch = 8;

Dataset training_set();  // of kSteps batches

using Parameters = std::vector<std::pair<std::string, at::Tensor>>;
uint64_t digest_of(const Parameters& parameters);

struct Listener {
  std::function<bool(int step)> before;  // a false ends the training
  std::function<void(int step, const Parameters& parameters)> after;
};
void train(Rank& rank, const Dataset& data, Steps& steps, const Listener& listener);

}  // namespace lockstep::simulation

// Each rank's work in a simulated job: it trains a net of some hundred parameters, and says what the rank has seen.
#pragma once

#include <lockstep/data/data.hpp>
#include <lockstep/ranks/rank.hpp>

#include "survive/elastic_job.hpp"
#include "trainer/run_state.hpp"

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace lockstep::simulation {

struct Steps {
  std::vector<uint64_t> weights;              // after each step, a digest; 0: this rank had no part in it
  std::vector<std::vector<int64_t>> samples;  // samples of each complete step
};

constexpr int64_t kBatch = 8;

Dataset training_set();  // has kSteps batches

using Parameters = std::vector<std::pair<std::string, at::Tensor>>;
uint64_t digest_of(const Parameters& parameters);

struct Listener {
  std::function<bool(int step)> before;                  // a false ends the training
  std::function<void(const RunState& state)> keep = {};  // on rank 0, every few steps; empty on all ranks: nothing is
};
void train(Rank& rank, const Dataset& data, Steps& steps, const Listener& listener);

// A generation's part of an elastic job, as train() of the library does it: from the most advanced rank's state on.
struct Progress {
  std::optional<RunState> state = {};
  bool is_last = false;  // the training is done
  int kept = 0;          // steps in the last checkpoint that this process has written
};
void train_elastic(Rank& rank, const Dataset& data, ElasticJob& job, Progress& progress, Steps& steps,
                   const Listener& listener);

// A checkpoint has these beside the parameters: their digest, and the optimizer state's; 0 if there is none.
struct StateDigest {
  uint64_t weights = 0, optimizer = 0;
};
StateDigest digest_of(const RunState& state);

}  // namespace lockstep::simulation

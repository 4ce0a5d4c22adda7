// The warnings of a run; and the expectation that it warns of a seed that a rank sets for all, whatever trains.
#pragma once

#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/ranks/rank.hpp>

#include <functional>
#include <string>

#include "test_devices.hpp"

namespace lockstep {

inline std::string warnings_in(int ranks, const std::function<void(Rank&)>& body) {
  std::string texts;
  run(test_devices(ranks), body, {.on_warning = [&](const std::string& text) { texts += text + "\n"; }});
  return texts;
}

// `train` makes something that trains this net, calls the function that it gets, and takes a step. So a rank sets the
// seed in the middle of a training.
using OneStep = std::function<void(Rank&, const torch::nn::Sequential& net, const std::function<void()>& before_step)>;
inline void expect_warned_of_a_seed_in_the_loop(const OneStep& train) {
  const auto warnings = [&](bool seeded) {
    return warnings_in(2, [&](Rank& rank) {
      const auto net =
          rank.in_turn([] { return torch::nn::Sequential(torch::nn::Linear(3, 3), torch::nn::Linear(3, 3)); });
      train(rank, net, [&] {
        rank.barrier();
        if (seeded && rank.index() == 1) torch::manual_seed(1234);
        rank.barrier();
      });
    });
  };
  torch::manual_seed(1);
  EXPECT_THAT(warnings(true), testing::HasSubstr("torch::manual_seed was called by a rank"));
  EXPECT_EQ(warnings(false), "");
}

}  // namespace lockstep

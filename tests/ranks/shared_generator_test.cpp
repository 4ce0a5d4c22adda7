// Labels: concurrency
// LibTorch's generator, which all ranks of a process share: layers that draw from it are warned of.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/data_parallel/data_parallel.hpp>
#include <lockstep/nn/dropout.hpp>
#include <lockstep/pipeline/pipeline.hpp>

#include "support/test_devices.hpp"

#include <functional>
#include <string>

namespace lockstep {
namespace shared_generator_test {

using testing::AllOf;
using testing::HasSubstr;
using torch::nn::AnyModule;
using torch::nn::Sequential;

std::string warnings_in(int ranks, const std::function<void(Rank&)>& body) {
  std::string texts;
  run(test_devices(ranks), body, {.on_warning = [&](const std::string& text) { texts += text + "\n"; }});
  return texts;
}

TEST(SharedGenerator, WarnsOfLayersThatDrawFromIt) {
  const auto make = [](auto layer) {
    return [layer](Rank& rank) { DataParallel(Sequential({{"drop", layer}}), rank); };
  };
  const auto in_a_pipeline = [](Rank& rank) {
    Pipeline(split_into_stages(Sequential({{"linear", AnyModule(torch::nn::Linear(2, 2))},
                                           {"drop", AnyModule(torch::nn::Dropout(0.5))}}),
                               2),
             rank);
  };
  EXPECT_THAT(warnings_in(2, in_a_pipeline),
              AllOf(HasSubstr("rank 1 (cpu): Pipeline: drop draws"), HasSubstr("lockstep::Dropout")));
  EXPECT_THAT(warnings_in(2, make(torch::nn::Dropout(0.5))),
              AllOf(HasSubstr("drop draws"), HasSubstr("lockstep::Dropout")));
  EXPECT_EQ(warnings_in(1, make(torch::nn::Dropout(0.5))), "");
  EXPECT_EQ(warnings_in(2, make(Dropout(0.5))), "");
}

}  // namespace shared_generator_test
}  // namespace lockstep

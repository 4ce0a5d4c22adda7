// Labels: concurrency
// Networks with dropout under train(): their weights do not depend on the number of ranks.
#include <gmock/gmock.h>
#include <torch/torch.h>

#include "support/test_devices.hpp"
#include "trainer/rank_trainer.hpp"
#include "trainer/workload.hpp"

#include <vector>

namespace lockstep {
namespace dropout_trainer_test {

using torch::Tensor;

TEST(DropoutTrainer, TheProgramsAlexNetTrainsTheSameOnAnyNumberOfRanks) {
  const ImageData data = synthetic_images(40, 10);
  TrainOptions options;
  options.model.name = "alexnet";
  options.model.width = 0.05;
  options.model.image_size = 65;
  options.batch.size = 16;
  options.rate.lr = 0.05;
  std::vector<Tensor> expected;
  for (const int ranks : {1, 2, 3}) {
    run(test_devices(ranks),
        [&](Rank& rank) {
          const TrainCallbacks callbacks;
          RankTrainer trainer(options, callbacks, task_of(options, data), rank, nullptr, nullptr);
          trainer.epoch(1);
          if (rank.index() != 0) return;
          const auto weights = trainer.whole()->parameters();
          if (ranks == 1) expected = weights;
          for (size_t i = 0; i < weights.size(); ++i) {
            EXPECT_TRUE(torch::allclose(weights[i], expected[i], 1e-4, 1e-6)) << ranks << " ranks, weight " << i;
          }
        },
        {.seed = options.seed});
  }
}

}  // namespace dropout_trainer_test
}  // namespace lockstep

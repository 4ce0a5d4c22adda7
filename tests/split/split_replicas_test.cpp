// check_replicas of a SplitModel: a part of a network is compared with its replicas.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/data/data.hpp>
#include <lockstep/data_parallel/check_replicas.hpp>
#include <lockstep/data_parallel/optimizer.hpp>
#include <lockstep/split/split_model.hpp>

#include "support/error_of.hpp"
#include "support/test_devices.hpp"

#include <string>

namespace lockstep {
namespace split_replicas_test {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
namespace F = torch::nn::functional;
namespace nn = torch::nn;

const Dataset data{torch::rand({24, 6}), torch::arange(24) % 3};

// A stage's layers are compared with those of its replicas, and all ranks are told.
TEST(SplitReplicas, OfAPartOfANetworkAreCompared) {
  for (const MeshShape& mesh : {MeshShape{.data = 2, .pipeline = 2}, {.data = 2, .tensor = 2}}) {
    for (const Sharded sharded : {Sharded::nothing, Sharded::gradients}) {
      const auto layers = [] {
        torch::manual_seed(1);
        return nn::Sequential(nn::Linear(6, 4), nn::ReLU(), nn::Linear(4, 4));
      };
      run(test_devices(4), [&](Rank& rank) {
        const nn::Sequential mine = rank.in_turn(layers);
        SplitModel net(mine, rank, {.mesh = mesh}, {.sharded = sharded});
        Optimizer sgd(net, torch::optim::SGDOptions(0.1).momentum(0.9));
        for (auto& batch :
             batches({data.x.to(rank.device()), data.y.to(rank.device())}, {.size = 12}, net.mesh().data())) {
          sgd.zero_grad();
          net.loss(batch, F::cross_entropy).backward();
          sgd.step();
        }
        check_replicas(sgd);
        check_replicas(net);
        const auto momentum = [&](const torch::Tensor& parameter) -> torch::Tensor& {
          return static_cast<torch::optim::SGDParamState&>(*sgd.inner().state().at(parameter.unsafeGetTensorImpl()))
              .momentum_buffer();
        };
        if (rank.index() == 1) momentum(sgd.inner().param_groups()[0].params()[0]).add_(1);
        const std::string with_state = error_of([&] { check_replicas(sgd); });
        EXPECT_EQ(error_of([&] { check_replicas(net); }), "(no error)");
        if (sharded != Sharded::nothing) {
          EXPECT_EQ(with_state, "(no error)");  // a slice of its own
          return;
        }
        EXPECT_THAT(with_state, AllOf(HasSubstr("rank 1 (cpu)"), HasSubstr("rank 3 (cpu)"),
                                      Not(HasSubstr("rank 2 (cpu)")), HasSubstr("in the optimizer's momentum")));
      });
    }
  }
}

}  // namespace split_replicas_test
}  // namespace lockstep

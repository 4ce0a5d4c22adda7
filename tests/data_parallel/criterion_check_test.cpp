// Labels: concurrency
// A criterion that is no mean over samples is refused in its first losses, on one rank too; others are left alone.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/data/data.hpp>
#include <lockstep/data_parallel/data_parallel.hpp>
#include <lockstep/devices/autocast.hpp>
#include <lockstep/ranks/rank.hpp>

#include "support/error_of.hpp"
#include "support/test_devices.hpp"

#include <functional>
#include <string>
#include <vector>

namespace criterion_check_test {

namespace F = torch::nn::functional;
using lockstep::Batch;
using lockstep::Criterion;
using lockstep::DataParallel;
using lockstep::error_of;
using lockstep::MeanOver;
using lockstep::Rank;
using lockstep::Refused;
using torch::Tensor;

constexpr int64_t kSamples = 15, kClasses = 3, kSteps = 5;

lockstep::Dataset classes() {
  const Tensor numbers = torch::arange(kSamples);
  return {torch::sin(torch::arange(kSamples * 4, torch::kDouble)).view({kSamples, 4}),
          numbers * numbers % kClasses,
          {{"mask", numbers % 4 > 0}}};
}

// Trains some steps. make(rank) gives the criterion.
lockstep::Caught trained(int ranks, const std::function<Criterion(Rank& rank)>& make,
                         const lockstep::BatchOptions& options = {.size = kSamples}) {
  const lockstep::Dataset data = classes();
  return error_of([&] {
    lockstep::run(lockstep::test_devices(ranks), [&](Rank& rank) {
      torch::nn::Linear linear(4, kClasses);
      linear->to(torch::kDouble);
      DataParallel net(linear, rank);
      torch::optim::SGD sgd(net->parameters(), 0.1);
      const Criterion criterion = make(rank);
      for (int64_t step = 0; step < kSteps; ++step) {
        for (const auto& batch : lockstep::batches(data, options, rank)) {
          sgd.zero_grad();
          net.loss(batch, criterion).backward();
          sgd.step();
        }
      }
    });
  });
}

struct Named {
  std::string name;
  Criterion criterion;
};

Tensor each_loss(const Tensor& y_hat, const Tensor& y) {
  return F::cross_entropy(y_hat, y, F::CrossEntropyFuncOptions().reduction(torch::kNone));
}

// Users write these by hand. On two ranks they trained wrongly in silence.
std::vector<Named> wrong_ones() {
  const auto weights_of = [](const Tensor& y) {
    return torch::tensor({1.0, 5.0, 0.5}, torch::kDouble).to(y.device()).index_select(0, y);
  };
  return {
      {"weights of classes",
       [weights_of](const Tensor& y_hat, const Tensor& y) {
         const Tensor weights = weights_of(y);
         return (weights * each_loss(y_hat, y)).sum() / weights.sum();
       }},
      {"a masked mean",
       [](const Tensor& y_hat, const Batch& batch) { return each_loss(y_hat, batch.y).index({batch["mask"]}).mean(); }},
      {"a sum", [](const Tensor& y_hat, const Tensor& y) { return each_loss(y_hat, y).sum(); }},
      {"a variance", [](const Tensor& y_hat, const Tensor&) { return y_hat.var(); }},
      {"a MeanOver of a mean", MeanOver([](const Tensor& y_hat, const Tensor& y) { return F::cross_entropy(y_hat, y); },
                                        [](const Tensor& y) { return y.ne(0).sum(); })}};
}

TEST(CriterionCheck, RefusesWhatIsNoMeanOverSamples) {
  for (const auto& wrong : wrong_ones()) {
    for (const int ranks : {1, 2})
      EXPECT_THAT(trained(ranks, [&](Rank&) { return wrong.criterion; }), Refused("criterion")) << wrong.name << ranks;
    EXPECT_THAT(trained(3, [&](Rank&) { return wrong.criterion; }, {.size = 7}), Refused("criterion"))
        << wrong.name << " in parts of two and three";
    EXPECT_THAT(trained(2, [&](Rank&) { return wrong.criterion; }, {.size = kSamples, .grain = 4}),
                Refused("criterion"))
        << wrong.name << " by grains";
    EXPECT_EQ(trained(2, [&](Rank&) { return Criterion::unchecked(wrong.criterion); }), "(no error)") << wrong.name;
  }
}

TEST(CriterionCheck, TakesMeans) {
  const std::vector<Named> right{
      {"of LibTorch", F::cross_entropy},
      {"with options", Criterion(F::cross_entropy, F::CrossEntropyFuncOptions().label_smoothing(0.1))},
      {"with weights", Criterion(F::cross_entropy,
                                 F::CrossEntropyFuncOptions().weight(torch::tensor({1.0, 5.0, 0.5}, torch::kDouble)))},
      {"a module", torch::nn::CrossEntropyLoss()},
      {"a sum over what is given",
       [](const Tensor& y_hat, const Tensor& y) { return each_loss(y_hat, y).sum() / y.size(0); }},
      {"and a penalty",
       [](const Tensor& y_hat,
          const Batch& batch) { return F::cross_entropy(y_hat, batch.y) + 0.1 * y_hat.square().mean() + 3; }},
      {"in 16 bits",
       [](const Tensor& y_hat, const Tensor& y) { return F::cross_entropy(y_hat.to(torch::kBFloat16), y); }},
      // The difference of two large numbers has their rounding.
      {"a difference", [](const Tensor& y_hat, const Tensor& y) {
         const Tensor large = y_hat.to(torch::kFloat) + 1e3;
         return (large.select(1, 0) - large.select(1, 1)).mean();
       }}};
  for (const auto& mean : right) {
    for (const int ranks : {1, 2, 3})
      EXPECT_EQ(trained(ranks, [&](Rank&) { return mean.criterion; }), "(no error)") << mean.name << ranks;
  }
}

// None of these could be called on halves. A rank with a single sample is not checked, so nothing may wait for it.
TEST(CriterionCheck, LeavesOutWhatCallsOthersDrawsOrNeedsAllSamples) {
  const auto with_number = [](double number) {
    return [number](const Tensor& y_hat, const Tensor&) { return y_hat.mean() * number; };
  };
  const auto of_all = [&](Rank& rank) -> Criterion {
    return [rank](const Tensor& y_hat, const Tensor&) mutable {
      const Tensor rows = torch::full({}, y_hat.size(0), y_hat.options().requires_grad(false));
      rank.allreduce(rows);
      return y_hat.sum() / rows;
    };
  };
  EXPECT_EQ(trained(2, of_all, {.size = 3}), "(no error)");
  const auto draws = [&](Rank&) -> Criterion {
    return [](const Tensor& y_hat, const Tensor&) { return y_hat.mean() * torch::rand({}, y_hat.options()); };
  };
  EXPECT_EQ(trained(2, draws), "(no error)");
  const auto draws_by_the_rank = [&](Rank& rank) -> Criterion {
    return [rank](const Tensor& y_hat, const Tensor&) {
      return y_hat.mean() * torch::rand({}, rank.generator(), y_hat.options());
    };
  };
  EXPECT_EQ(trained(1, draws_by_the_rank), "(no error)");
  const auto throws = [&](Rank&) -> Criterion {
    return [](const Tensor& y_hat, const Tensor& y) {
      if (y.size(0) != kSamples) throw std::runtime_error("not the whole batch");
      return y_hat.var();
    };
  };
  EXPECT_EQ(trained(1, throws), "(no error)");
  const auto in_place = [&](Rank&) -> Criterion {
    return [](const Tensor& y_hat, const Tensor&) { return (y_hat * 1).add_(1).var() + 0 * y_hat.add_(1).sum(); };
  };
  EXPECT_EQ(trained(1, in_place), "(no error)");
  for (const int64_t size : {2, 3}) {  // a row of outputs would be broadcast against the whole batch's targets
    const lockstep::Dataset whole = classes();
    const Tensor targets = whole.x.slice(0, 0, size).slice(1, 0, kClasses);
    const auto captures = [&](Rank& rank) -> Criterion {
      return [y = targets.to(rank.device())](const Tensor& y_hat, const Tensor&) { return F::mse_loss(y_hat, y); };
    };
    EXPECT_EQ(trained(1, captures, {.size = size, .drop_last = true}), "(no error)") << size;
  }
  EXPECT_EQ(trained(1, [&](Rank&) -> Criterion { return with_number(2); }), "(no error)");
}

// Outputs have 16 bits and losses 32, so nothing is rounded on the way.
TEST(CriterionCheck, RefusesThemUnderAutocastToo) {
  const auto said = error_of([] {
    lockstep::run(lockstep::test_devices(1), [](Rank& rank) {
      torch::nn::Linear linear(4, kClasses);
      linear->weight.set_data(torch::zeros({kClasses, 4}));  // by chance other numbers make a mean
      linear->bias.set_data(torch::tensor({4.0f, 0.0f, 0.0f}));
      DataParallel net(linear, rank);
      const lockstep::Dataset data = classes();
      const Batch batch{data.x.to(torch::kFloat).to(rank.device()), data.y.to(rank.device()), kSamples};
      const Tensor weights = torch::tensor({1.0f, 5.0f, 0.5f}, rank.device());
      const lockstep::Autocast precision(rank.device());
      net.loss(batch,
               [weights](const Tensor& y_hat, const Tensor& y) {
                 const Tensor of_each = weights.index_select(0, y);
                 return (of_each * each_loss(y_hat, y)).sum() / of_each.sum();
               })
          .backward();
    });
  });
  EXPECT_THAT(said, Refused("criterion"));
}

TEST(CriterionCheck, CallsTheCriterionTwiceMoreInThreeLossesAndNeverIfItIsUnchecked) {
  for (const bool checked : {true, false}) {
    int calls = 0;
    const auto count = [&](Rank&) -> Criterion {
      const Criterion counting = [&calls](const Tensor& y_hat, const Tensor& y) {
        ++calls;
        return F::cross_entropy(y_hat, y);
      };
      return checked ? counting : Criterion::unchecked(counting);
    };
    EXPECT_EQ(trained(1, count), "(no error)");
    EXPECT_EQ(calls, kSteps + (checked ? 2 * 3 : 0));
  }
}

}  // namespace criterion_check_test

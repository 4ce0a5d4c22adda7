// Labels: concurrency
// The ranks' averages over all grains, against the tree written out over the grains themselves.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/ranks/rank.hpp>

#include "data_parallel/grain_exchange.hpp"
#include "data_parallel/grain_sums.hpp"
#include "ranks/observed_backend.hpp"
#include "support/error_of.hpp"
#include "support/test_devices.hpp"

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace grain_exchange_test {

using lockstep::CommunicationHook;
using lockstep::Error;
using lockstep::Fails;
using lockstep::GrainPlan;
using lockstep::GrainSums;
using lockstep::Rank;
using testing::ElementsAre;
using torch::Tensor;
using Tensors = std::vector<Tensor>;
using Runs = std::vector<int64_t>;

// One gradient per grain, of so different sizes that another order of additions has other bits. Grains have zeros of
// both signs in common.
Tensors gradients(int64_t grains, int64_t size, torch::Dtype type) {
  torch::manual_seed(grains);
  Tensors all;
  for (int64_t grain = 0; grain < grains; ++grain) {
    Tensor gradient = torch::randn({size}) * std::pow(10, grain % 4);
    gradient[0] = -0.0;
    gradient[1] = 0.0;
    all.push_back(gradient.to(type));
  }
  return all;
}

// The largest power of two of grains goes to the left.
Tensor sum_of(const Tensors& grains, int64_t begin, int64_t end) {
  if (end - begin == 1) return grains[static_cast<size_t>(begin)];
  const auto size = static_cast<uint64_t>(end - begin);
  const auto left = static_cast<int64_t>(std::bit_floor(size - 1));
  return sum_of(grains, begin, begin + left) + sum_of(grains, begin + left, end);
}

Tensor average_of(const Tensors& grains, int64_t samples) {
  return sum_of(grains, 0, static_cast<int64_t>(grains.size())).div(static_cast<double>(samples)).add_(0.0);
}

void complete(CommunicationHook::Round round) {
  for (;; round = round.next()) {
    if (round.work) round.work->wait();
    if (!round.next) break;
  }
  if (round.finish) round.finish();
}

void expect_bits(const Tensor& actual, const Tensor& expected) {
  const Tensor here = actual.cpu();
  ASSERT_EQ(here.nbytes(), expected.nbytes());
  EXPECT_EQ(std::memcmp(here.const_data_ptr(), expected.const_data_ptr(), expected.nbytes()), 0)
      << "differs from what is expected by up to " << (here - expected).abs().max();
}

constexpr int64_t kSamples = 37;

// Whole averages, in place and elsewhere, and slices, of `size` values on `rank`.
void average_in_every_way(Rank& rank, const Runs& runs, const Tensors& grains) {
  const int64_t size = grains[0].numel(), slice = size / rank.world_size(), own = rank.index();
  const Tensor expected = average_of(grains, kSamples);
  const auto options = grains[0].options().device(rank.device());
  GrainSums sums(1, size, options, [](size_t, const Tensor& row) { return row; });
  const auto add_up = [&] {
    sums.begin({runs[own], runs[own + 1]});
    for (int64_t grain = runs[own]; grain < runs[own + 1]; ++grain) {
      sums.add(0, grain, {grains[static_cast<size_t>(grain)].to(rank.device())});
    }
    sums.finish();
    return sums.rows();
  };
  const GrainPlan plan{.runs = runs, .samples = kSamples};
  const Tensor whole = torch::full({size}, NAN, options), part = torch::full({slice}, NAN, options);
  complete(lockstep::post_grain_average(rank, add_up(), plan, whole, /*in_slices=*/false));
  expect_bits(whole, expected);
  complete(lockstep::post_grain_average(rank, add_up(), plan, part, /*in_slices=*/true));
  expect_bits(part, expected.narrow(0, own * slice, slice));
  complete(lockstep::post_grain_average(rank, add_up(), plan, sums.first_row(), /*in_slices=*/false));
  expect_bits(sums.first_row(), expected);
}

const std::vector<Runs> kRuns = {
    {0, 1},
    {0, 6},
    {0, 4, 8},
    {0, 0, 3},
    {0, 5, 5},
    {0, 3, 11},
    {0, 1, 2, 3},
    {0, 4, 4, 9},
    {0, 3, 6, 7},
    {0, 2, 4, 6, 8},
    {0, 0, 1, 6, 13},
    {0, 1, 2, 3, 4, 5},
    {0, 7, 7, 8, 13, 21},
    {0, 1, 2, 3, 4, 5, 6, 7, 8},
    {0, 5, 5, 6, 8, 13, 14, 14, 27},
};

TEST(GrainExchangeTest, AddsInTheOrderOfTheTree) {
  for (const auto& runs : kRuns) {
    const auto ranks = static_cast<int64_t>(runs.size()) - 1;
    for (const auto type : {torch::kFloat, torch::kDouble, torch::kBFloat16}) {
      for (const int64_t size : {2 * ranks, 1500 * ranks}) {  // done by one rank, and by all
        const Tensors grains = gradients(runs.back(), size, type);
        lockstep::run(lockstep::test_devices(static_cast<size_t>(ranks)),
                      [&](Rank& rank) { average_in_every_way(rank, runs, grains); });
      }
    }
  }
}

// ---- What a rank's calls go through.

// Has no other calls than these of c10d, as a backend that somebody else wrote.
class Foreign : public c10d::Backend {
 public:
  explicit Foreign(c10::intrusive_ptr<c10d::Backend> backend)
      : Backend(backend->getRank(), backend->getSize()), backend_(std::move(backend)) {}

  c10::intrusive_ptr<c10d::Work> alltoall(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllToAllOptions& options) override {
    return backend_->alltoall(outputs, inputs, options);
  }
  c10::intrusive_ptr<c10d::Work> _allgather_base(Tensor& output, Tensor& input,
                                                 const c10d::AllgatherOptions& options) override {
    return backend_->_allgather_base(output, input, options);
  }

 private:
  const c10::intrusive_ptr<c10d::Backend> backend_;
};

using Calls = std::vector<std::pair<c10d::OpType, int64_t>>;  // and bytes

struct Noted : lockstep::CallObserver {
  void posts(c10d::OpType type, int64_t bytes, int) override { calls.emplace_back(type, bytes); }
  void spent(double) override {}
  Calls calls;
};

Calls calls_of(const std::function<Rank(Rank&)>& wrapped) {
  const Runs runs = {0, 3, 3, 7};
  const Tensors grains = gradients(runs.back(), 12, torch::kFloat);
  const auto observer = std::make_shared<Noted>();
  lockstep::run(lockstep::test_devices(3), [&](Rank& rank) {
    const auto mine = rank.index() == 2 ? observer : std::make_shared<Noted>();
    Rank noted = lockstep::observed(wrapped(rank), {mine});
    average_in_every_way(noted, runs, grains);
  });
  return observer->calls;
}

TEST(GrainExchangeTest, TakesOneCallInOneProcess) {
  using enum c10d::OpType;
  EXPECT_THAT(calls_of([](Rank& rank) { return rank; }),
              ElementsAre(std::pair(ALLREDUCE, 48), std::pair(REDUCE_SCATTER, 16), std::pair(ALLREDUCE, 48)));
}

TEST(GrainExchangeTest, GoesThroughBackendsThatHaveNoMoreThanCalls) {
  using enum c10d::OpType;
  const auto foreign = [](Rank& rank) {
    return rank.wrapped([](const auto& backend) { return c10::make_intrusive<Foreign>(backend); });
  };
  EXPECT_THAT(calls_of(foreign),
              ElementsAre(std::pair(ALLTOALL, 96), std::pair(_ALLGATHER_BASE, 16), std::pair(ALLTOALL, 96),
                          std::pair(ALLTOALL, 96), std::pair(_ALLGATHER_BASE, 16)));
}

// ---- Calls that do not fit.

// The error where rank 1 averages by `plan` and the others by a plan of two samples in two grains.
lockstep::Caught error_with(const GrainPlan& plan, bool in_slices = false, int rows = 1) {
  return lockstep::error_of([&] {
    lockstep::run(lockstep::test_devices(2), [&](Rank& rank) {
      const Tensors all(rank.index() == 1 ? rows : 1, torch::ones({4}, rank.device()));
      const GrainPlan usual{.runs = {0, 1, 2}, .samples = 2};
      complete(lockstep::post_grain_average(rank, all, rank.index() == 1 ? plan : usual,
                                            torch::ones({4}, rank.device()), rank.index() == 1 && in_slices));
    });
  });
}

TEST(GrainExchangeTest, RefusesCallsThatDiffer) {
  EXPECT_THAT(error_with({.runs = {0, 2, 3}, .samples = 2}), Fails(Error::difference));
  EXPECT_THAT(error_with({.runs = {0, 1, 2}, .samples = 3}), Fails(Error::difference));
  EXPECT_THAT(error_with({.runs = {0, 1, 2}, .samples = 2}, /*in_slices=*/true), Fails(Error::difference));
  EXPECT_THAT(error_with({.runs = {0, 1, 2}, .samples = 2}, /*in_slices=*/false, /*rows=*/2), Fails(Error::difference));
}

TEST(GrainExchangeTest, EndsWhereARankLeaves) {
  const auto error = lockstep::error_of([] {
    lockstep::run(lockstep::test_devices(3), [](Rank& rank) {
      if (rank.index() == 1) return;
      const Tensor row = torch::ones({3}, rank.device());
      complete(lockstep::post_grain_average(rank, {row}, {.runs = {0, 1, 2, 3}, .samples = 3}, row, false));
    });
  });
  EXPECT_THAT(error, Fails(Error::difference));
}

}  // namespace grain_exchange_test

// Labels: 2x2
// No lifetime ends in a crash: what is kept, moved, or made of a Rank that is gone works, or is an Error.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/data/data.hpp>
#include <lockstep/data_parallel/convert_sync_batchnorm.hpp>
#include <lockstep/data_parallel/data_parallel.hpp>
#include <lockstep/data_parallel/optimizer.hpp>
#include <lockstep/data_parallel/sync_batch_norm.hpp>
#include <lockstep/lab/balance.hpp>
#include <lockstep/lab/local_sgd.hpp>
#include <lockstep/server/parameter_server.hpp>
#include <lockstep/split/split_model.hpp>

#include "support/group_tests.hpp"
#include "support/lone_pipeline.hpp"
#include "support/scratch_folder.hpp"

#include <cstdlib>
#include <functional>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace lifetimes_test {

using namespace lockstep;
using torch::Tensor;
namespace F = torch::nn::functional;
namespace nn = torch::nn;

class LifetimesWorlds : public Worlds {};
INSTANTIATE_TEST_SUITE_P(Sizes, LifetimesWorlds, testing::Values(1, 2, 4),
                         [](const auto& info) { return std::to_string(info.param) + "Ranks"; });

const Dataset data{torch::arange(96.0).reshape({16, 6}).sin(), torch::arange(16) % 3};  // the same in each process

Batch one_batch(const Rank& rank) {
  return *batches(data, {.size = 16, .shuffle = false}, rank).begin();
}

Batch whole_batch() {
  return *batches(data, {.size = 16, .shuffle = false}).begin();
}

nn::Sequential layers() {
  return nn::Sequential(nn::Linear(6, 5), nn::ReLU(), nn::Linear(5, 4), nn::Linear(4, 4));
}

nn::Sequential seeded_layers() {
  torch::manual_seed(1);
  return layers();
}

const auto kSgd = [](auto slices) {
  return std::make_unique<torch::optim::SGD>(slices, torch::optim::SGDOptions(0.1).momentum(0.9));
};

// All that each rank of this process would have kept, by what main() could make of it.
template <class Kept>
using OfRanks = std::vector<std::optional<Kept>>;

// ---- Ranks that are gone while the run goes on.

// Everything that takes a Rank, of one that is a local copy.
struct Everything {
  DataParallel<nn::LinearImpl> net;
  Optimizer sgd;
  DataParallel<nn::LinearImpl> other;
  Balance balance;
  LocalSgd local;
  LonePipeline pipeline;

  explicit Everything(Rank rank)
      : net(nn::Linear(6, 3), rank, {.sharded = Sharded::state}),
        sgd(net, torch::optim::SGDOptions(0.1).momentum(0.9)),
        other(nn::Linear(6, 3), rank),
        balance(other, rank),
        local(other->parameters(), rank, {.sync_every = 2}),
        pipeline(layers(), rank) {}

  void step(const Batch& batch, Batches& all, const Batch& whole) {
    sgd.zero_grad();
    net.loss(batch, F::cross_entropy).backward();
    sgd.step();
    other.loss(batch, F::cross_entropy).backward();
    balance.step(batch, all);
    local.step();
    pipeline.forward_backward(whole, F::cross_entropy);
  }
};

std::unique_ptr<Everything> of_a_group(Rank& rank) {
  Rank group = rank.group(rank.index() % 2);
  auto everything = std::make_unique<Everything>(group);
  return everything;
}

TEST_P(LifetimesWorlds, WhatIsMadeOfALocalCopyOutlivesIt) {
  on_ranks([](Rank& rank) {
    for (const bool group : {false, true}) {
      const auto everything = group ? of_a_group(rank) : std::make_unique<Everything>(rank);
      Rank members = group ? rank.group(rank.index() % 2) : rank;
      auto all = batches(data, {.size = 16}, members);
      for (int step = 0; step < 4; ++step) everything->step(one_batch(members), all, whole_batch());
    }
  });
}

// ---- Moves.

TEST_P(LifetimesWorlds, AMoveLeavesTheSameBehind) {
  on_ranks([](Rank& rank) {
    Rank copy = rank, moved_rank = std::move(copy);
    moved_rank.barrier();
    copy.barrier();
    EXPECT_EQ(copy.name(), rank.name());

    DataParallel net(nn::Linear(6, 3), rank);
    auto moved = std::move(net);
    auto loss = moved.loss(one_batch(rank), F::cross_entropy);
    auto moved_loss = std::move(loss);
    moved_loss.backward();
    EXPECT_EQ(loss.item(), moved_loss.item());
    net.loss(one_batch(rank), F::cross_entropy).backward();
    EXPECT_TRUE(net->weight.is_same(moved->weight));
  });
}

TEST_P(LifetimesWorlds, AMovedSplitModelTrains) {
  on_ranks([](Rank& rank) {
    const int ranks = rank.world_size();
    for (const MeshShape& mesh : {MeshShape{.data = ranks}, MeshShape{.pipeline = ranks}, MeshShape{.tensor = ranks}}) {
      SplitModel first(rank.in_turn([] { return seeded_layers(); }), rank, {.mesh = mesh});
      SplitModel second = std::move(first);
      for (SplitModel* net : {&second, &first}) {
        const Batch batch = one_batch(net->mesh().data());
        Optimizer sgd(*net, torch::optim::SGDOptions(0.1));
        Loss loss = net->loss(batch, F::cross_entropy);
        loss.backward();
        EXPECT_GT(loss.item(), 0);
        EXPECT_EQ(net->forward(batch.x.slice(0, 0, 1)).size(1), 4);
      }
    }
  });
}

static_assert(!std::is_move_constructible_v<Optimizer> && !std::is_move_constructible_v<Balance> &&
              !std::is_move_constructible_v<LocalSgd>);

// ---- What is kept after run().

TEST_P(LifetimesWorlds, ARankThatIsKeptSaysThatItsRunIsOver) {
  OfRanks<Rank> ranks(4);
  on_ranks([&](Rank& rank) { ranks[static_cast<size_t>(rank.index())] = rank.group(0); });
  for (auto& rank : ranks) {
    if (!rank) continue;
    const auto over = Refused();
    EXPECT_THAT(error_of([&] { rank->allreduce(torch::ones({3})); }), over);
    EXPECT_THAT(error_of([&] { rank->barrier(); }), over);
    EXPECT_THAT(error_of([&] { rank->group(0); }), over);
    EXPECT_THAT(error_of([&] { rank->in_turn([] { return 0; }); }), over);
    EXPECT_THAT(error_of([&] { DataParallel(nn::Linear(6, 3), *rank); }), over);
    EXPECT_THAT(error_of([&] { rank->wrapped([](auto backend) { return backend; }); }), over);
    EXPECT_LT(rank->index_in_process(), GetParam());
    EXPECT_GE(rank->process(), 0);
    EXPECT_TRUE(rank->generator().defined());
  }
}

TEST_P(LifetimesWorlds, ANetThatIsKeptForwardsAndItsBackwardIsAnError) {
  OfRanks<DataParallel<nn::LinearImpl>> nets(4);
  OfRanks<Loss> losses(4);
  on_ranks([&](Rank& rank) {
    const auto index = static_cast<size_t>(rank.index());
    nets[index].emplace(nn::Linear(6, 3), rank);
    nets[index]->loss(one_batch(rank), F::cross_entropy).backward();
    losses[index] = nets[index]->loss(one_batch(rank), F::cross_entropy);
  });
  for (size_t index = 0; index < nets.size(); ++index) {
    if (!nets[index]) continue;
    auto& net = *nets[index];
    EXPECT_EQ(net(data.x).size(1), 3);
    auto loss =
        net.loss(data.x.size(0) > 0 ? Batch{data.x, data.y, data.size() * GetParam()} : Batch{}, F::cross_entropy);
    EXPECT_GT(loss.item(), 0);
    EXPECT_THAT(error_of([&] { loss.backward(); }), Refused());
    EXPECT_THAT(error_of([&] { losses[index]->backward(); }), Refused());
    EXPECT_THAT(error_of([&] { net.backward_through([] {}); }), Refused());
    auto guard = net.no_sync();
    EXPECT_THAT(error_of([&] { net.loss(Batch{data.x, data.y, 16}, F::cross_entropy).backward(); }), Refused());
  }
}

// A SyncBatchNorm keeps a Rank too: training's forward and backward ask the other ranks.
TEST_P(LifetimesWorlds, ANetWithSyncBatchNormThatIsKeptEvaluatesAndItsTrainingIsAnError) {
  OfRanks<DataParallel<nn::SequentialImpl>> with_norm(4);
  std::vector<Tensor> losses(4);
  on_ranks([&](Rank& rank) {
    const auto index = static_cast<size_t>(rank.index());
    nn::Sequential net(nn::Linear(6, 3), nn::BatchNorm1d(3));
    ASSERT_EQ(convert_sync_batchnorm(*net, rank), 1);
    with_norm[index].emplace(net, rank);
    losses[index] = (*with_norm[index])(one_batch(rank).x).square().sum();
  });
  for (size_t index = 0; index < with_norm.size(); ++index) {
    if (!with_norm[index]) continue;
    auto& net = *with_norm[index];
    EXPECT_THAT(error_of([&] { net(data.x); }), Refused());
    EXPECT_THAT(error_of([&] { losses[index].backward(); }), Refused());
    net->eval();
    EXPECT_EQ(net(data.x).size(1), 3);
  }
}

// c10d's handles of calls, of which nobody waited for some in the run.
TEST_P(LifetimesWorlds, WorksThatAreKeptAreDone) {
  std::vector<std::vector<c10::intrusive_ptr<c10d::Work>>> works(4);
  std::vector<Tensor> sums(4);
  on_ranks([&](Rank& rank) {
    const auto index = static_cast<size_t>(rank.index());
    sums[index] = torch::ones({3});
    std::vector<Tensor> sum{sums[index]}, other{torch::ones({3})};
    works[index].push_back(rank.backend().allreduce(sum));
    works[index].push_back(rank.backend().broadcast(other));
    works[index][1]->wait();
  });
  for (size_t index = 0; index < works.size(); ++index) {
    for (const auto& work : works[index]) {
      EXPECT_TRUE(work->wait());
      EXPECT_TRUE(work->isCompleted());
    }
    if (!works[index].empty()) EXPECT_TRUE(sums[index].equal(torch::full({3}, 1.0 * GetParam())));
  }
}

TEST_P(LifetimesWorlds, EverythingThatIsKeptSaysSo) {
  const ScratchFolder folder;
  std::vector<std::unique_ptr<Everything>> kept(4);
  on_ranks([&](Rank& rank) {
    auto& all = kept[static_cast<size_t>(rank.index())] = std::make_unique<Everything>(rank);
    auto batches_of_one = batches(data, {.size = 16}, rank);
    all->step(one_batch(rank), batches_of_one, whole_batch());
  });
  for (const auto& all : kept) {
    if (!all) continue;
    EXPECT_THAT(error_of([&] { all->sgd.step(); }), Refused());
    EXPECT_THAT(error_of([&] { all->sgd.save(folder / "sgd"); }), Refused());
    all->sgd.zero_grad();
    EXPECT_THAT(error_of([&] { all->local.step(), all->local.synchronize(); }), Refused());
    if (GetParam() == 1) continue;  // nobody is asked
    EXPECT_THAT(error_of([&] { all->pipeline.forward_backward({data.x, data.y, 16}, F::cross_entropy); }), Refused());
    EXPECT_THAT(error_of([&] { all->pipeline.forward(data.x); }), Refused());
    auto batches_of_one = batches(data, {.size = 4});
    EXPECT_THAT(error_of([&] {
                  for (int i = 0; i < 20; ++i) all->balance.step({data.x, data.y, 16}, batches_of_one);
                }),
                Refused());
  }
}

TEST_P(LifetimesWorlds, ASplitModelThatIsKeptSaysSo) {
  OfRanks<SplitModel> nets(4);
  on_ranks([&](Rank& rank) {
    nets[static_cast<size_t>(rank.index())].emplace(layers(), rank, ModelSplit{.mesh = {.tensor = rank.world_size()}});
  });
  for (auto& net : nets) {
    if (!net) continue;
    EXPECT_THAT(error_of([&] { net->loss({data.x, data.y, 16}, F::cross_entropy).backward(); }), Refused());
    if (GetParam() > 1) EXPECT_THAT(error_of([&] { net->forward(data.x); }), Refused());
  }
}

TEST_P(LifetimesWorlds, AModuleOutlivesItsNet) {
  std::vector<std::shared_ptr<nn::LinearImpl>> modules(4);
  Tensor y;
  on_ranks([&](Rank& rank) {
    DataParallel net(nn::Linear(6, 3), rank);
    modules[static_cast<size_t>(rank.index())] = std::dynamic_pointer_cast<nn::LinearImpl>(net->shared_from_this());
    Tensor loss;
    {
      DataParallel brief(nn::Linear(6, 3), rank);
      loss = brief(data.x).sum();
    }
    loss.backward();  // through hooks that are gone
  });
  for (const auto& module : modules) {
    if (module) module->forward(data.x).sum().backward();
  }
}

TEST(Lifetimes, AWorkerThatIsKeptSaysThatItsTrainingIsOver) {
  std::optional<ParameterServer> kept;
  run(test_devices(2), [&](Rank& rank) {
    std::optional<Worker> worker;
    ParameterServer server(nn::Linear(6, 3), rank, kSgd);
    server.train([&](Worker& here) {
      here.step();
      worker = here;
    });
    if (!worker) return;
    EXPECT_THAT(error_of([&] { worker->step(); }), Refused());
    kept = std::move(server);
    EXPECT_EQ(server.workers(), 1);
  });
  EXPECT_THAT(error_of([&] { kept->train([](Worker&) {}); }), Refused());
}

// ---- Null modules.

TEST_P(LifetimesWorlds, ANullModuleIsRefused) {
  on_ranks([](Rank& rank) {
    EXPECT_THAT(error_of([&] { DataParallel<nn::LinearImpl>(std::shared_ptr<nn::LinearImpl>(), rank); }), Refused());
    EXPECT_THAT(error_of([&] { DataParallel(nn::Linear(nullptr), rank); }), Refused());
    EXPECT_THAT(error_of([&] { SplitModel(nn::Sequential(nullptr), rank, {.mesh = {.data = rank.world_size()}}); }),
                Refused());
    EXPECT_THAT(error_of([&] { ParameterServer(nn::Linear(nullptr), rank, kSgd); }), Refused());
  });
}

// ---- Batches.

TEST(Lifetimes, AnIteratorOfTemporaryBatchesKeepsThem) {
  auto iterator = batches(data, {.size = 4, .shuffle = false}).begin();
  int64_t samples = 0;
  for (const auto end = batches(data, {.size = 4}).end(); !(iterator == end); ++iterator) {
    EXPECT_TRUE(iterator->x.equal(data.x.slice(0, samples, samples + 4)));
    samples += iterator->size();
  }
  EXPECT_EQ(samples, data.size());
}

// ---- std::exit.

// Rank 1 calls std::exit while the other does `others` again and again.
void exit_in_a_rank(const std::function<void(Rank&)>& others) {
  std::atexit([] { std::cerr << "handlers ran"; });
  run(test_devices(2), [&](Rank& rank) {
    DataParallel net(layers(), rank);
    net.loss(one_batch(rank), F::cross_entropy).backward();
    if (rank.index() == 1) std::exit(7);
    for (;;) others(rank);
  });
}

void compute() {
  layers()->forward(data.x).sum().backward();
}

class LifetimesExit : public testing::Test {
 protected:
  LifetimesExit() { GTEST_FLAG_SET(death_test_style, "threadsafe"); }
};

TEST_F(LifetimesExit, WhileAnotherRankWaitsEndsTheProcessAsElsewhere) {
  EXPECT_EXIT(exit_in_a_rank([](Rank& rank) { rank.barrier(); }), testing::ExitedWithCode(7), "handlers ran");
}

TEST_F(LifetimesExit, WhileAnotherRankTrainsEndsTheProcessAsElsewhere) {
  const auto computes_and_waits = [](Rank& rank) {
    for (int i = 0; i < 100; ++i) compute();
    rank.barrier();
  };
  EXPECT_EXIT(exit_in_a_rank(computes_and_waits), testing::ExitedWithCode(7), "handlers ran");
}

TEST_F(LifetimesExit, WhileAnotherRankComputesForEverEndsTheProcess) {
  EXPECT_EXIT(exit_in_a_rank([](Rank&) { compute(); }), testing::ExitedWithCode(7), "");
}

TEST_F(LifetimesExit, OfAllRanksEndsTheProcess) {
  EXPECT_EXIT(run(test_devices(4),
                  [](Rank& rank) {
                    rank.barrier();
                    std::exit(5);
                  }),
              testing::ExitedWithCode(5), "");
}

TEST_F(LifetimesExit, InARunInsideOfARunEndsTheProcess) {
  const auto inner = [](Rank&) { std::exit(6); };
  EXPECT_EXIT(run(test_devices(2),
                  [&](Rank& rank) {
                    if (rank.index() == 1) run(test_devices(1), inner);
                    for (;;) compute();
                  }),
              testing::ExitedWithCode(6), "");
}

}  // namespace lifetimes_test

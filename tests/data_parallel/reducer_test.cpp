// Labels: concurrency
// When DataParallel averages what: buckets during backward, the order they learn, unused parameters, failures.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/base/error.hpp>
#include <lockstep/data_parallel/data_parallel.hpp>

#include "data_parallel/replica.hpp"
#include "support/group_tests.hpp"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

namespace reducer_test {

using lockstep::Batch;
using lockstep::DataParallel;
using lockstep::DataParallelOptions;
using lockstep::Error;
using lockstep::error_of;
using lockstep::Fails;
using lockstep::Rank;
using lockstep::Refused;
using testing::AllOf;
using testing::Each;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;
using testing::SizeIs;
using torch::Tensor;
namespace F = torch::nn::functional;

const DataParallelOptions one_each{.bucket_bytes = 1, .first_bucket_bytes = 1};  // a bucket per parameter

using Log = std::vector<std::string>;

// Notes every allreduce and hands it on.
class Spy : public c10d::Backend {
 public:
  Spy(c10::intrusive_ptr<c10d::Backend> backend, Log& log)
      : Backend(backend->getRank(), backend->getSize()), backend_(std::move(backend)), log_(log) {}

  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override {
    if (options.reduceOp == c10d::ReduceOp::AVG) log_.push_back("average " + std::to_string(tensors[0].numel()));
    return backend_->allreduce(tensors, options);
  }
  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<Tensor>& tensors,
                                           const c10d::BroadcastOptions& options) override {
    return backend_->broadcast(tensors, options);
  }
  c10::intrusive_ptr<c10d::Work> _allgather_base(Tensor& output, Tensor& input,
                                                 const c10d::AllgatherOptions& options) override {
    return backend_->_allgather_base(output, input, options);
  }
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& options) override {
    return backend_->barrier(options);
  }
  const std::string getBackendName() const override { return backend_->getBackendName(); }

 private:
  const c10::intrusive_ptr<c10d::Backend> backend_;
  Log& log_;
};

// Runs body(rank, log) on CPU ranks whose allreduces are noted in their own logs, and returns these.
std::vector<Log> run_spied(int world, const std::function<void(Rank&, Log&)>& body) {
  std::vector<Log> logs(world);
  lockstep::run(lockstep::test_devices(world), [&](Rank& rank) {
    Log& log = logs[rank.index()];
    Rank spied = rank.wrapped([&](const auto& backend) { return c10::make_intrusive<Spy>(backend, log); });
    body(spied, log);
  });
  return logs;
}

// Three layers of 1, 2 and 3 parameters' elements, registered in the order c, a, b and used in the order a, b, c; each
// notes when its backward begins.
struct Scales : torch::nn::Module {
  explicit Scales(Log* log = nullptr, double start = 1) : log(log) {
    c = register_parameter("c", torch::full({3}, start, torch::kDouble));
    a = register_parameter("a", torch::full({1}, start, torch::kDouble));
    b = register_parameter("b", torch::full({2}, start, torch::kDouble));
  }
  Tensor forward(const Tensor& x) {
    Tensor y = noted(x, "a");
    y = y * a.sum();
    y = noted(y, "b");
    y = y * b.sum();
    y = noted(y, "c");
    return y * c.sum();
  }
  Tensor noted(const Tensor& x, const std::string& name) const {
    if (log == nullptr) return x;
    Tensor y = x.requires_grad() ? x * 1 : x.clone().requires_grad_();
    y.register_hook([this, name](const Tensor&) { log->push_back("computed " + name); });
    return y;
  }
  Tensor c, a, b;
  Log* log;
};

Batch inputs(const Rank& rank, int64_t size = 1) {
  const auto doubles = torch::dtype(torch::kDouble).device(rank.device());
  return {torch::full({size}, rank.index() + 1.0, doubles), torch::zeros({size}, doubles), size * rank.world_size()};
}

Tensor mean_of_outputs(const Tensor& y_hat, const Tensor&) {
  return y_hat.mean();
}

// One backward of Scales over inputs(): with every weight 1, loss = x * 1 * 2 * 3.
void expect_gradients_of_scales(const Scales& net, int world, double times = 1) {
  const double x = (world + 1) / 2.0 * times;  // the mean over the ranks
  EXPECT_TRUE(torch::allclose(net.a.grad().cpu(), torch::full({1}, 6 * x, torch::kDouble))) << net.a.grad();
  EXPECT_TRUE(torch::allclose(net.b.grad().cpu(), torch::full({2}, 3 * x, torch::kDouble))) << net.b.grad();
  EXPECT_TRUE(torch::allclose(net.c.grad().cpu(), torch::full({3}, 2 * x, torch::kDouble))) << net.c.grad();
}

ptrdiff_t place(const Log& log, const std::string& line) {
  return std::find(log.begin(), log.end(), line) - log.begin();
}

Log averages(Log log) {
  std::erase_if(log, [](const std::string& line) { return !line.starts_with("average"); });
  return log;
}

TEST(Reducer, PostsBucketsWhileBackwardComputesInTheOrderLearnedInTheFirst) {
  const auto body = [](Rank& rank, Log& log) {
    DataParallel net(Scales(&log), rank, one_each);
    for (int step = 0; step < 3; ++step) {
      net->zero_grad(/*set_to_none=*/step == 1);
      log.clear();
      net.loss(inputs(rank), mean_of_outputs).backward();
      expect_gradients_of_scales(*net, 3);
      if (step == 0) {  // the reverse of registration; c has to wait for a
        EXPECT_THAT(averages(log), ElementsAre("average 2", "average 1", "average 3"));
      } else {
        EXPECT_THAT(averages(log), ElementsAre("average 3", "average 2", "average 1"));
        EXPECT_LT(place(log, "average 3"), place(log, "computed b"));
      }
      EXPECT_LT(place(log, "average 2"), place(log, "computed a"));
      EXPECT_THAT(log, SizeIs(6));
    }
  };
  run_spied(3, body);
}

TEST(Reducer, WithoutOverlapPostsAllBucketsAfterBackward) {
  DataParallelOptions options = one_each;
  options.overlap = false;
  const auto logs = run_spied(2, [&](Rank& rank, Log& log) {
    DataParallel net(Scales(&log), rank, options);
    net.loss(inputs(rank), mean_of_outputs).backward();
    expect_gradients_of_scales(*net, 2);
  });
  for (const Log& log : logs) {
    EXPECT_THAT(log, ElementsAre("computed c", "computed b", "computed a", "average 2", "average 1", "average 3"));
  }
}

TEST(Reducer, BucketsFillUpToTheirSizeAndHoldOneType) {
  struct TwoTypes : torch::nn::Module {
    TwoTypes() {
      for (int i = 0; i < 6; ++i) {
        const auto type = i % 2 == 0 ? torch::kDouble : torch::kFloat;
        weights.push_back(register_parameter("p" + std::to_string(i), torch::ones({10 + i}, type)));
      }
    }
    Tensor forward(const Tensor& x) {
      Tensor y = x;
      for (const auto& weight : weights) y = y * weight.mean();
      return y;
    }
    std::vector<Tensor> weights;
  };
  const auto logs = run_spied(2, [](Rank& rank, Log& log) {
    // Gradients get ready in this order: p5 (15 floats), p4 (14 doubles), p3 (13 floats), p2 (12 doubles), p1 (11
    // floats), p0 (10 doubles). The first bucket is full at one float, the others at 50 floats or 25 doubles.
    DataParallel net(TwoTypes(), rank, {.bucket_bytes = 200, .first_bucket_bytes = 4});
    for (int step = 0; step < 2; ++step) {
      net->zero_grad();
      log.clear();
      net.loss(inputs(rank), mean_of_outputs).backward();
    }
    for (const auto& weight : net->weights) {
      EXPECT_EQ(weight.grad().scalar_type(), weight.scalar_type());
      EXPECT_NEAR(weight.grad().sum().item<double>(), 1.5, 1e-5);
    }
  });
  for (const Log& log : logs) EXPECT_THAT(log, ElementsAre("average 15", "average 26", "average 24", "average 10"));
}

TEST(Reducer, LearnsLaterIfRankZeroHadNothing) {
  const auto logs = run_spied(2, [](Rank& rank, Log& log) {
    DataParallel net(Scales(), rank, one_each);
    const auto backward = [&](bool empty) {
      net->zero_grad();
      Batch batch = inputs(rank);
      if (empty) {
        batch.global_size = 1;
        if (rank.index() == 0) batch.x = batch.x.slice(0, 0, 0), batch.y = batch.y.slice(0, 0, 0);
      }
      net.loss(batch, mean_of_outputs).backward();
      const double x = empty ? 2 : 1.5;  // rank 1's alone, or the mean
      EXPECT_NEAR(net->a.grad().item<double>(), 6 * x, 1e-12);
    };
    backward(true);
    EXPECT_THAT(log, ElementsAre("average 2", "average 1", "average 3"));
    log.clear();
    backward(false);  // learns
    EXPECT_THAT(log, ElementsAre("average 2", "average 1", "average 3"));
    log.clear();
    backward(false);
    backward(true);
  });
  for (const Log& log : logs)
    EXPECT_THAT(log, ElementsAre("average 3", "average 2", "average 1", "average 3", "average 2", "average 1"));
}

TEST(Reducer, GoesOnInAnOrderThatWasLearntBeforeButNotInAForeignOne) {
  using Order = std::vector<int64_t>;
  run_spied(2, [](Rank& rank, Log& log) {
    DataParallel first(Scales(), rank, one_each), second(Scales(), rank, one_each);
    EXPECT_THAT(first.replica()->averaging()->order(), IsEmpty());
    for (const Order& foreign :
         {Order{}, Order{3, -1, -1, -1}, Order{3, 0, 1, 1}, Order{3, 0, 1, 3}, Order{4, 0, 1, 2}}) {
      first.replica()->averaging()->set_order(foreign);
      EXPECT_THAT(first.replica()->averaging()->order(), IsEmpty());
    }
    first.loss(inputs(rank), mean_of_outputs).backward();
    EXPECT_THAT(log, ElementsAre("average 2", "average 1", "average 3"));
    Order order = first.replica()->averaging()->order();
    order.push_back(-1);  // a checkpoint fills an order up beside longer ones
    second.replica()->averaging()->set_order(order);
    order.pop_back();
    EXPECT_EQ(second.replica()->averaging()->order(), order);
    log.clear();
    second.loss(inputs(rank), mean_of_outputs).backward();
    EXPECT_THAT(log, ElementsAre("average 3", "average 2", "average 1"));
    expect_gradients_of_scales(*second, 2);
  });
}

TEST(Reducer, RebuiltBucketsKeepGradientsAndNothingIsCopiedLater) {
  lockstep::run(lockstep::test_devices(2), [](Rank& rank) {
    DataParallel net(Scales(), rank, one_each);
    net.loss(inputs(rank), mean_of_outputs).backward();  // rebuilds
    expect_gradients_of_scales(*net, 2);
    const void* const memory = net->b.grad().data_ptr();
    for (int times = 2; times < 4; ++times) {
      net.loss(inputs(rank), mean_of_outputs).backward();
      expect_gradients_of_scales(*net, 2, times);
      EXPECT_EQ(net->b.grad().data_ptr(), memory);
    }
    net->zero_grad(/*set_to_none=*/true);
    net.loss(inputs(rank), mean_of_outputs).backward();
    expect_gradients_of_scales(*net, 2);
    EXPECT_EQ(net->b.grad().data_ptr(), memory);
  });
}

// Takes one of three ways, by its input, and never the last.
struct Ways : torch::nn::Module {
  Ways() {
    for (int i = 0; i < 4; ++i) {
      ways.push_back(register_parameter("way" + std::to_string(i), torch::ones({i + 1}, torch::kDouble)));
    }
  }
  Tensor forward(const Tensor& x) { return x * ways[x[0].item<int64_t>() % 3].sum(); }
  std::vector<Tensor> ways;
};

TEST(Reducer, RanksThatUseDifferentParametersPostTheSameBuckets) {
  const auto logs = run_spied(3, [](Rank& rank, Log&) {
    DataParallel net(Ways(), rank, one_each);
    for (int step = 0; step < 4; ++step) {
      net->zero_grad(step % 2 == 0);
      Batch batch = inputs(rank);
      batch.x += step;
      net.loss(batch, mean_of_outputs).backward();
      for (int way = 0; way < 4; ++way) {  // the ranks' inputs are step + 1, 2, 3, of which one is `way` modulo 3
        double x = 0;
        for (int value = step + 1; value <= step + 3; ++value) x += value % 3 == way ? value / 3.0 : 0;
        if (way == 3) {
          EXPECT_FALSE(net->ways[way].grad().defined());
          continue;
        }
        EXPECT_NEAR(net->ways[way].grad()[0].item<double>(), x, 1e-12) << way;
      }
    }
  });
  EXPECT_THAT(logs[0], SizeIs(16));
  EXPECT_THAT(logs, Each(logs[0]));
}

void train_with_an_unused_parameter(Rank& rank) {
  DataParallel net(Ways(), rank, one_each);
  for (int step = 0; step < 3; ++step) net.loss(inputs(rank), mean_of_outputs).backward();
  EXPECT_FALSE(net->ways[3].grad().defined());
  DataParallel all_used(Scales(), rank, one_each);
  all_used.loss(inputs(rank), mean_of_outputs).backward();
}

TEST(Reducer, ParametersThatNoRankUsesAreNamedOnce) {
  std::vector<std::string> texts;
  lockstep::run(lockstep::test_devices(3), train_with_an_unused_parameter,
                {.on_warning = [&](const std::string& text) { texts.push_back(text); }});
  EXPECT_THAT(texts, ElementsAre(AllOf(HasSubstr("rank 0 (cpu)"), HasSubstr("way3"), Not(HasSubstr("way0")),
                                       Not(HasSubstr("way1")), Not(HasSubstr("way2")))));
}

class Warnings : public c10::WarningHandler {
 public:
  void process(const c10::Warning& warning) override { texts.push_back(warning.msg()); }
  std::vector<std::string> texts;
};

TEST(Reducer, WithoutACallbackWarningsGoToLibTorchsHandler) {
  std::vector<std::string> texts;
  lockstep::run(lockstep::test_devices(2), [&](Rank& rank) {
    Warnings warnings;
    const c10::WarningUtils::WarningHandlerGuard guard(&warnings);  // per thread
    train_with_an_unused_parameter(rank);
    if (rank.index() == 0) texts = warnings.texts;
  });
  EXPECT_THAT(texts, ElementsAre(HasSubstr("way3")));
}

TEST(Reducer, AParameterThatIsFrozenLaterGetsNoGradientSoThatOptimizersLeaveItAlone) {
  lockstep::run(lockstep::test_devices(2), [](Rank& rank) {
    DataParallel net(std::make_shared<Scales>(), rank, one_each);
    torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.01).momentum(0.9).weight_decay(0.1));
    net.loss(inputs(rank), mean_of_outputs).backward();
    expect_gradients_of_scales(*net, 2);
    sgd.step();
    net->b.requires_grad_(false);
    const Tensor a = net->a.clone(), b = net->b.clone();
    for (int step = 0; step < 2; ++step) {
      sgd.zero_grad();
      net.loss(inputs(rank), mean_of_outputs).backward();
      sgd.step();
      EXPECT_FALSE(net->b.grad().defined());
    }
    EXPECT_TRUE(torch::equal(net->b, b));
    EXPECT_FALSE(torch::equal(net->a, a));
  });
}

TEST(Reducer, AParameterOfTwoNamesHasOneGradient) {
  struct Tied : torch::nn::Module {
    Tied() {
      first = register_parameter("first", torch::ones({2}, torch::kDouble));
      second = register_parameter("second", first);
    }
    Tensor forward(const Tensor& x) { return x * first.sum() * second.sum(); }
    Tensor first, second;
  };
  lockstep::run(lockstep::test_devices(2), [](Rank& rank) {
    DataParallel net(Tied(), rank, one_each);
    for (int step = 0; step < 3; ++step) {
      net->zero_grad(step == 1);
      net.loss(inputs(rank), mean_of_outputs).backward();
      EXPECT_TRUE(net->first.grad().eq(6).all().item<bool>()) << net->first.grad();  // 1.5 * 2 * (1 + 1)
    }
  });
}

TEST(Reducer, ChannelsLastParametersKeepTheirStrides) {
  lockstep::run(lockstep::test_devices(2), [](Rank& rank) {
    torch::nn::Conv2d conv(torch::nn::Conv2dOptions(3, 4, 2));
    conv->weight.set_data(conv->weight.contiguous(torch::MemoryFormat::ChannelsLast));
    // Like NCCL, `strict` refuses memory in another order than a tensor's dimensions.
    Rank strict = lockstep::counted(rank, std::make_shared<lockstep::CountingBackend::Calls>());
    DataParallel net(conv, strict);
    const Tensor x = torch::full({1, 3, 2, 2}, rank.index() + 1.0) * torch::arange(12).view({1, 3, 2, 2});
    net.mean(net(x).sum(), 1, 2).backward();
    EXPECT_EQ(net->weight.grad().strides(), net->weight.strides());
    EXPECT_TRUE(torch::allclose(net->weight.grad()[0], 1.5 * torch::arange(12).view({3, 2, 2}).to(torch::kFloat)));
  });
}

TEST(Reducer, OnlyTheLossesOwnBackwardAverages) {
  const auto logs = run_spied(2, [](Rank& rank, Log& log) {
    DataParallel net(Scales(), rank, one_each);
    const auto plain = [&](Scales& module) { module.forward(inputs(rank).x).mean().backward(); };
    plain(*net);
    EXPECT_NEAR(net->a.grad().item<double>(), 6 * (rank.index() + 1), 1e-12);
    {
      const auto guard = net.no_sync();
      net.loss(inputs(rank), mean_of_outputs).backward();
    }
    EXPECT_THAT(log, IsEmpty());
    net.loss(inputs(rank), mean_of_outputs).backward();
    expect_gradients_of_scales(*net, 2, 3);
    EXPECT_THAT(log, SizeIs(3));

    auto module = std::make_shared<Scales>();
    const auto accumulator = torch::autograd::impl::grad_accumulator(module->a);
    {
      DataParallel gone(module, rank, one_each);
      gone.loss(inputs(rank), mean_of_outputs).backward();
    }
    EXPECT_THAT(accumulator->post_hooks(), IsEmpty());
    module->zero_grad();
    log.clear();
    plain(*module);  // outlives the DataParallel, and is as before
    EXPECT_NEAR(module->a.grad().item<double>(), 6 * (rank.index() + 1), 1e-12);
    EXPECT_THAT(log, IsEmpty());
  });
}

TEST(Reducer, BucketSizesBelowOneAreRefused) {
  EXPECT_THAT(error_of([] {
                lockstep::run(lockstep::test_devices(2),
                              [](Rank& rank) { DataParallel net(Scales(), rank, {.bucket_bytes = 0}); });
              }),
              Refused());
}

// Fails in the middle of backward, after the first bucket was posted.
Tensor failing(const Tensor& x, bool fail) {
  const Tensor y = x * 1;
  y.register_hook([fail](const Tensor& gradient) {
    if (fail) throw std::runtime_error("the hook failed");
    return gradient;
  });
  return y;
}

struct FailsBeforeTheFirstLayer : Scales {
  Tensor forward(const Tensor& x) { return failing(x * a.sum() * b.sum(), fail) * c.sum(); }
  bool fail = false;
};

TEST(Reducer, AnExceptionInBackwardEndsTheRun) {
  const auto start = std::chrono::steady_clock::now();
  const auto error = error_of([] {
    lockstep::run(lockstep::test_devices(3), [](Rank& rank) {
      DataParallel net(FailsBeforeTheFirstLayer(), rank, one_each);
      for (int step = 0; step < 3; ++step) {
        net->fail = step == 2 && rank.index() == 1;
        net.loss(inputs(rank), mean_of_outputs).backward();
      }
    });
  });
  EXPECT_THAT(error, Fails(Error::user_code, {1}));
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
}

TEST(Reducer, ARankThatCatchesAnExceptionOfBackwardCannotGoOn) {
  const auto start = std::chrono::steady_clock::now();
  std::string caught;
  const auto error = error_of([&] {
    lockstep::run(lockstep::test_devices(3), [&](Rank& rank) {
      DataParallel net(FailsBeforeTheFirstLayer(), rank, one_each);
      for (int step = 0; step < 4; ++step) {
        net->fail = step == 2 && rank.index() == 1;
        try {
          net.loss(inputs(rank), mean_of_outputs).backward();
        } catch (const std::exception& exception) {
          if (rank.index() != 1 || step != 2) throw;
          caught = exception.what();
        }
      }
    });
  });
  EXPECT_EQ(caught, "the hook failed");
  EXPECT_THAT(error, Fails(Error::refused, {1}));
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
}

// Computes its gradient by a second backward, inside the backward that calls this function.
struct Again : torch::autograd::Function<Again> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x, const Tensor& weight) {
    context->save_for_backward({x.detach(), weight});
    return x * weight.detach().sum();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    const torch::AutoGradMode grad(true);
    const Tensor x = saved[0].detach().requires_grad_();
    (x * saved[1].sum()).backward(gradients[0]);
    return {x.grad(), Tensor()};
  }
};

TEST(Reducer, AGradientThatGrowsAfterItsBucketWasAveragedIsAnErrorUnlessNothingOverlaps) {
  struct Twice : torch::nn::Module {
    Twice() { weight = register_parameter("weight", torch::ones({2}, torch::kDouble)); }
    Tensor forward(const Tensor& x) { return Again::apply(Again::apply(x.clone().requires_grad_(), weight), weight); }
    Tensor weight;
  };
  const auto backward = [](Rank& rank, bool overlap, int64_t grain) {
    DataParallelOptions options = one_each;
    options.overlap = overlap;
    DataParallel net(Twice(), rank, options);
    Batch batch = inputs(rank, 2);
    batch.first = 2 * rank.index();
    batch.grain = grain;
    net.loss(batch, mean_of_outputs).backward();
    EXPECT_TRUE(net->weight.grad().eq(6).all().item<bool>()) << net->weight.grad();  // 1.5 * 2 * (1 + 1)
  };
  for (const int64_t grain : {0, 1}) {
    EXPECT_THAT(
        error_of([&] { lockstep::run(lockstep::test_devices(2), [&](Rank& rank) { backward(rank, true, grain); }); }),
        Refused());
    lockstep::run(lockstep::test_devices(2), [&](Rank& rank) { backward(rank, false, grain); });
  }
}

}  // namespace reducer_test

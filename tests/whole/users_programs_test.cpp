// Labels: 3x3
// Programs whose losses are no means over samples, or whose layers do more than compute, as users wrote them: each is
// trained by plain LibTorch on whole batches and by DataParallel over 1, 2, 3 and 7 ranks, in float64. lab/
// loss_scaler_test.cpp has one more, with a scaler.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/data/data.hpp>
#include <lockstep/data_parallel/convert_sync_batchnorm.hpp>
#include <lockstep/data_parallel/data_parallel.hpp>
#include <lockstep/data_parallel/optimizer.hpp>
#include <lockstep/ranks/functional.hpp>

#include "support/group_tests.hpp"
#include "support/scratch_folder.hpp"

#include <atomic>
#include <cmath>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace lockstep {
namespace users_programs_test {

using torch::Tensor;
namespace F = torch::nn::functional;
namespace nn = torch::nn;

constexpr double kTolerance = 1e-12;
constexpr int kEpochs = 2;

using UsersProgramsWorlds = Worlds;
INSTANTIATE_TEST_SUITE_P(Sizes, UsersProgramsWorlds, testing::Values(1, 2, 3, 7),
                         [](const auto& info) { return std::to_string(info.param) + "Ranks"; });

// ---- What the programs have in common.

Tensor doubles(at::IntArrayRef sizes) {
  return torch::randn(sizes, torch::kDouble);
}

torch::optim::SGDOptions sgd_options() {
  return torch::optim::SGDOptions(0.1).momentum(0.9).weight_decay(0.01);
}

template <class Net>
std::shared_ptr<Net> made() {
  torch::manual_seed(5);
  auto net = std::make_shared<Net>();
  net->to(torch::kDouble);
  return net;
}

// Trains by plain LibTorch. loss_of(net, batch) gives the loss of a whole batch.
template <class Net>
std::shared_ptr<Net> on_one_device(const Dataset& data, int64_t size, const auto& loss_of) {
  auto net = made<Net>();
  torch::optim::SGD sgd(net->parameters(), sgd_options());
  for (int epoch = 0; epoch < kEpochs; ++epoch) {
    for (const auto& batch : batches(data, {.size = size, .epoch = epoch})) {
      sgd.zero_grad();
      loss_of(*net, batch).backward();
      sgd.step();
    }
  }
  return net;
}

void expect_same(const nn::Module& net, const nn::Module& alone) {
  for (const auto& [mine, theirs] : {std::pair{net.named_parameters(), alone.named_parameters()},
                                     std::pair{net.named_buffers(), alone.named_buffers()}}) {
    ASSERT_EQ(mine.keys(), theirs.keys());
    for (const auto& item : theirs) expect_near(mine[item.key()].detach(), item.value(), kTolerance, item.key());
  }
}

// How a program goes on several ranks.
struct Way {
  std::string name = "plain";
  int64_t grain = 0;
  int parts = 1;
  DataParallelOptions options = {};
};

// Trains over `rank`'s ranks. loss_of(net, batch) gives the loss of this rank's part.
template <class Net>
void expect_same_on_ranks(Rank& rank, const Dataset& data, int64_t size, const nn::Module& alone, const Way& way,
                          const auto& loss_of) {
  SCOPED_TRACE(way.name);
  const auto module = rank.in_turn(made<Net>);
  convert_sync_batchnorm(*module, rank);
  DataParallel net(module, rank, way.options);
  Optimizer sgd(net, sgd_options());
  for (int epoch = 0; epoch < kEpochs; ++epoch) {
    for (const auto& batch : batches(data, {.size = size, .epoch = epoch, .grain = way.grain}, rank)) {
      sgd.zero_grad();
      const auto parts = batch.in_parts(way.parts);
      for (size_t i = 0; i < parts.size(); ++i) {
        std::optional<NoSync> later;
        if (i + 1 < parts.size()) later.emplace(net.replica());
        loss_of(net, parts[i]).backward();
      }
      sgd.step();
    }
  }
  const auto whole = net.whole();
  expect_same(*net, alone);
}

// ---- A tagger of sentences.

constexpr int64_t kPadding = -1, kWords = 11, kTags = 3, kLength = 6;

struct Tagger : nn::Module {
  Tensor forward(const Batch& batch) {
    const auto packed = nn::utils::rnn::pack_padded_sequence(words(batch.x), batch["length"].cpu(),
                                                             /*batch_first=*/true, /*enforce_sorted=*/false);
    const auto states = std::get<0>(lstm->forward_with_packed_input(packed));
    const auto padded = nn::utils::rnn::pad_packed_sequence(states, /*batch_first=*/true, 0.0, batch.x.size(1));
    return tags(std::get<0>(padded));
  }
  nn::Embedding words = register_module("words", nn::Embedding(kWords, 4));
  nn::LSTM lstm = register_module("lstm", nn::LSTM(nn::LSTMOptions(4, 5).bidirectional(true).batch_first(true)));
  nn::Linear tags = register_module("tags", nn::Linear(10, kTags));
};

Dataset sentences() {
  torch::manual_seed(1);
  const Tensor length = torch::arange(12) % kLength + 1;
  const Tensor y = torch::randint(kTags, {12, kLength});
  y.masked_fill_(torch::arange(kLength) >= length.unsqueeze(1), kPadding);
  return {torch::randint(kWords, {12, kLength}), y, {{"length", length}}};
}

Tensor sum_of_words(const Tensor& y_hat, const Tensor& y) {
  return F::cross_entropy(y_hat.flatten(0, 1), y.flatten(),
                          F::CrossEntropyFuncOptions().ignore_index(kPadding).reduction(torch::kSum));
}

TEST_P(UsersProgramsWorlds, Tagger) {
  const Dataset data = sentences();
  const auto alone = on_one_device<Tagger>(data, 5, [](Tagger& net, const Batch& batch) {
    return sum_of_words(net.forward(batch), batch.y) / batch.y.ne(kPadding).sum();
  });
  const MeanOver over_words(sum_of_words, [](const Tensor& y) { return y.ne(kPadding).sum(); });
  on_ranks([&](Rank& rank) {
    for (const Way& way : {Way{}, Way{.name = "parts", .parts = 2}, Way{.name = "grains", .grain = 2}}) {
      expect_same_on_ranks<Tagger>(rank, data, 5, *alone, way,
                                   [&](auto& net, const Batch& part) { return net.loss(part, over_words); });
    }
  });
}

// ---- A contrastive loss of all pairs of images.

struct Encoder : nn::Module {
  Tensor forward(const Batch& batch) {  // [n, 2, 3]: two views of each image
    return second(first(torch::stack({batch.x, batch["view"]}, 1)).tanh());
  }
  nn::Linear first = register_module("first", nn::Linear(6, 8)), second = register_module("second", nn::Linear(8, 3));
  Tensor scale = register_parameter("scale", torch::full({}, 2.0));  // CLIP has one too
};

// The losses of the rows [begin, end) of 2n, as SimCLR has them.
Tensor contrastive(const Tensor& views, const Tensor& scale, int64_t begin, int64_t end) {
  const int64_t n = views.size(0);
  const Tensor z = F::normalize(views.transpose(0, 1).flatten(0, 1), F::NormalizeFuncOptions().dim(1));
  const Tensor itself = torch::eye(2 * n, views.options().dtype(torch::kBool));
  const Tensor similar = z.mm(z.t()).mul(scale.exp()).masked_fill(itself, -INFINITY);
  const Tensor other = (torch::arange(2 * n, itself.options().dtype(torch::kLong)) + n) % (2 * n);
  return F::cross_entropy(similar.slice(0, begin, end), other.slice(0, begin, end),
                          F::CrossEntropyFuncOptions().reduction(torch::kSum)) /
         (2 * n);
}

TEST_P(UsersProgramsWorlds, Contrastive) {
  torch::manual_seed(2);
  const Dataset data{doubles({8, 6}), torch::zeros({8}), {{"view", doubles({8, 6})}}};  // batches of 5 and 3
  const auto alone = on_one_device<Encoder>(data, 5, [](Encoder& net, const Batch& batch) {
    return contrastive(net.forward(batch), net.scale, 0, 2 * batch.size());
  });
  on_ranks([&](Rank& rank) {
    const double ranks = rank.world_size();
    expect_same_on_ranks<Encoder>(rank, data, 5, *alone, {.name = "all of it"}, [&](auto& net, const Batch& part) {
      const Tensor all = allgather_with_gradient(net(part), rank);
      return net.mean(contrastive(all, net->scale, 0, 2 * all.size(0)), 1, ranks);
    });
    expect_same_on_ranks<Encoder>(rank, data, 5, *alone, {.name = "a share"}, [&](auto& net, const Batch& part) {
      const Tensor all = allgather_with_gradient(net(part), rank);
      const int64_t rows = 2 * all.size(0), r = rank.index();
      return net.mean(
          ranks * contrastive(all, net->scale, rows * r / rank.world_size(), rows * (r + 1) / rank.world_size()), 1,
          ranks);
    });
  });
}

// ---- Segmentation.

nn::Sequential block(int64_t from, int64_t to) {
  return nn::Sequential(nn::Conv2d(nn::Conv2dOptions(from, to, 3).padding(1)), nn::BatchNorm2d(to), nn::ReLU());
}

struct UNet : nn::Module {
  Tensor forward(const Tensor& x) {
    const Tensor wide = down->forward(x);
    const Tensor narrow = deep->forward(F::max_pool2d(wide, F::MaxPool2dFuncOptions(2)));
    return out(torch::cat({wide, up(narrow)}, 1));
  }
  nn::Sequential down = register_module("down", block(1, 3)), deep = register_module("deep", block(3, 4));
  nn::ConvTranspose2d up = register_module("up", nn::ConvTranspose2d(nn::ConvTranspose2dOptions(4, 2, 2).stride(2)));
  nn::Conv2d out = register_module("out", nn::Conv2d(5, kTags, 1));
};

TEST_P(UsersProgramsWorlds, Segmentation) {
  torch::manual_seed(3);
  const Dataset data{doubles({6, 1, 4, 4}), torch::randint(kTags, {6, 4, 4})};  // batches of 4 and 2
  const auto options = F::CrossEntropyFuncOptions().weight(torch::tensor({0.5, 3.0, 1.0}, torch::kDouble));
  const auto alone = on_one_device<UNet>(
      data, 4, [&](UNet& net, const Batch& batch) { return F::cross_entropy(net.forward(batch.x), batch.y, options); });
  on_ranks([&](Rank& rank) {
    auto there = options;
    there.weight(options.weight().to(rank.device()));
    expect_same_on_ranks<UNet>(rank, data, 4, *alone, {},
                               [&](auto& net, const Batch& part) { return net.loss(part, F::cross_entropy, there); });
  });
}

// ---- Actor and critic: games with 0 to 5 moves, each rank plays some.

struct ActorCritic : nn::Module {
  std::pair<Tensor, Tensor> forward(const Tensor& states) {
    const Tensor hidden = body(states).tanh();
    return {actor(hidden).log_softmax(1), critic(hidden).squeeze(1)};
  }
  nn::Linear body = register_module("body", nn::Linear(4, 8)), actor = register_module("actor", nn::Linear(8, kTags)),
             critic = register_module("critic", nn::Linear(8, 1));
};

struct Moves {
  Tensor states, actions, returns;
  int64_t size() const { return states.size(0); }
};

constexpr int kGames = 7;
constexpr int kMoves[kGames] = {3, 0, 5, 1, 0, 2, 4};

// The moves of the games `begin`, begin + step, …; in each iteration others.
Moves played(int iteration, int begin, int step, c10::Device device) {
  std::vector<Tensor> states{torch::zeros({0, 4}, torch::kDouble)};
  for (int game = begin; game < kGames; game += step) {
    const int64_t moves = kMoves[(game + iteration) % kGames];
    states.push_back(torch::sin(torch::arange(4 * moves, torch::kDouble) * (game + 1) + iteration).view({moves, 4}));
  }
  const Tensor all = torch::cat(states).to(device);
  return {all, all.abs().sum(1).mul(7).to(torch::kLong) % kTags, all.sum(1)};
}

// The mean over these moves of three losses.
Tensor loss_of_moves(const Moves& moves, const std::pair<Tensor, Tensor>& out, const Tensor& advantages) {
  const auto& [logs, values] = out;
  const Tensor taken = logs.gather(1, moves.actions.unsqueeze(1)).squeeze(1);
  const Tensor entropies = -(logs.exp() * logs).sum(1);
  return -(taken * advantages).mean() + 0.5 * F::mse_loss(values, moves.returns) - 0.01 * entropies.mean();
}

TEST_P(UsersProgramsWorlds, ActorCritic) {
  const auto alone = made<ActorCritic>();
  torch::optim::SGD sgd(alone->parameters(), sgd_options());
  for (int iteration = 0; iteration < 3; ++iteration) {
    const Moves moves = played(iteration, 0, 1, torch::kCPU);
    const auto out = alone->forward(moves.states);
    const Tensor advantages = (moves.returns - out.second).detach();
    sgd.zero_grad();
    loss_of_moves(moves, out, (advantages - advantages.mean()) / advantages.std(/*unbiased=*/false)).backward();
    sgd.step();
  }
  on_ranks([&](Rank& rank) {
    DataParallel net(rank.in_turn(made<ActorCritic>), rank);
    Optimizer sgd(net, sgd_options());
    for (int iteration = 0; iteration < 3; ++iteration) {
      const Moves moves = played(iteration, rank.index(), rank.world_size(), rank.device());
      const auto out = net(moves.states);
      const Tensor advantages = (moves.returns - out.second).detach();
      const Tensor sums =
          torch::stack({torch::full_like(advantages, 1).sum(), advantages.sum(), advantages.square().sum()});
      rank.allreduce(sums);
      const Tensor mean = sums[1] / sums[0], deviation = (sums[2] / sums[0] - mean.square()).sqrt();
      sgd.zero_grad();
      const Tensor loss = loss_of_moves(moves, out, (advantages - mean) / deviation);
      net.mean(loss, static_cast<double>(moves.size()), sums[0].item<double>()).backward();
      sgd.step();
    }
    expect_same(*net, *alone);
  });
}

// ---- A mixture of experts, of which many get no sample.

constexpr int64_t kExperts = 6;

struct Experts : nn::Module {
  Experts() {
    for (int64_t i = 0; i < kExperts; ++i) experts->push_back(nn::Linear(4, kTags));
  }

  // Gives each sample's logits, probabilities of the experts, and expert.
  std::tuple<Tensor, Tensor, Tensor> forward(const Tensor& x) {
    const Tensor chances = router(x).softmax(1), best = chances.argmax(1);
    Tensor y = torch::zeros({x.size(0), kTags}, x.options());
    for (int64_t i = 0; i < kExperts; ++i) {
      const Tensor rows = (best == i).nonzero().squeeze(1);
      if (rows.numel() == 0) continue;
      const Tensor of_expert = experts[static_cast<size_t>(i)]->as<nn::Linear>()->forward(x.index_select(0, rows));
      y = y.index_add(0, rows, of_expert * chances.index_select(0, rows).select(1, i).unsqueeze(1));
    }
    return {y, chances, best};
  }
  nn::Linear router = register_module("router", nn::Linear(4, kExperts));
  nn::ModuleList experts = register_module("experts", nn::ModuleList());
};

Tensor counts_of(const Tensor& best) {
  return torch::one_hot(best, kExperts).sum(0).to(torch::kDouble);
}

// The mean of cross-entropy, and of the balancing loss of the Switch Transformer, whose `shares` have no gradient.
Tensor balanced(const Tensor& y_hat, const Tensor& chances, const Tensor& shares, const Tensor& y) {
  return F::cross_entropy(y_hat, y) + 0.1 * kExperts * (chances.mean(0) * shares).sum();
}

TEST_P(UsersProgramsWorlds, MixtureOfExperts) {
  torch::manual_seed(4);
  const Dataset data{doubles({12, 4}) * 4, torch::randint(kTags, {12})};  // batches of 7 and 5
  int without = 0;                                                        // experts without a sample in a batch
  const auto alone = on_one_device<Experts>(data, 7, [&](Experts& net, const Batch& batch) {
    const auto [y_hat, chances, best] = net.forward(batch.x);
    without += static_cast<int>(counts_of(best).eq(0).sum().item<int64_t>());
    return balanced(y_hat, chances, counts_of(best) / batch.size(), batch.y);
  });
  EXPECT_THAT(without, testing::AllOf(testing::Gt(0), testing::Lt(18)));  // there are 6 experts in 4 batches
  on_ranks([&](Rank& rank) {
    expect_same_on_ranks<Experts>(rank, data, 7, *alone, {}, [&](auto& net, const Batch& part) {
      const auto [y_hat, chances, best] = net(part.x);
      const Tensor counts = counts_of(best);
      rank.allreduce(counts);  // also where this rank has no sample
      return net.mean(balanced(y_hat, chances, counts / part.global_size, part.y), part.size(), part.global_size);
    });
  });
}

// ---- Checkpointed activations.

// Forgets what the layer's forward computes, and computes it again in a backward within backward.
class Again : public torch::autograd::Function<Again> {
 public:
  static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& x, nn::Sequential layer) {
    ctx->save_for_backward({x});
    ctx->saved_data["layer"] = reinterpret_cast<int64_t>(layer.ptr().get());
    return layer->forward(x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& gradients) {
    const Tensor x = ctx->get_saved_variables()[0].detach().requires_grad_();
    const at::AutoGradMode with_gradients(true);
    auto* const layer = reinterpret_cast<nn::SequentialImpl*>(ctx->saved_data.at("layer").toInt());
    layer->forward(x).backward(gradients[0]);
    return {x.grad(), Tensor()};
  }
};

struct Checkpointed : nn::Module {
  Tensor forward(const Tensor& x) { return last(Again::apply(first(x).tanh(), middle)); }
  nn::Linear first = register_module("first", nn::Linear(4, 6)), last = register_module("last", nn::Linear(6, kTags));
  nn::Sequential middle = register_module("middle", nn::Sequential(nn::Linear(6, 8), nn::Tanh(), nn::Linear(8, 6)));
};

TEST_P(UsersProgramsWorlds, Checkpointing) {
  torch::manual_seed(6);
  const Dataset data{doubles({10, 4}), torch::randint(kTags, {10})};
  const auto alone = on_one_device<Checkpointed>(
      data, 6, [](Checkpointed& net, const Batch& batch) { return F::cross_entropy(net.forward(batch.x), batch.y); });
  const std::vector<Way> ways = {{},
                                 {.name = "grains", .grain = 2},
                                 {.name = "parts", .parts = 2},
                                 {.name = "tiny buckets", .options = {.bucket_bytes = 8, .first_bucket_bytes = 8}},
                                 {.name = "no overlap", .options = {.overlap = false}},
                                 {.name = "ZeRO 2", .options = {.sharded = Sharded::gradients}},
                                 {.name = "ZeRO 3", .options = {.sharded = Sharded::parameters}}};
  on_ranks([&](Rank& rank) {
    for (const Way& way : ways) {
      expect_same_on_ranks<Checkpointed>(rank, data, 6, *alone, way,
                                         [](auto& net, const Batch& part) { return net.loss(part, F::cross_entropy); });
    }
  });
}

// ---- Two nets against each other, and the result with LibTorch alone.

struct Maker : nn::Module {
  Tensor forward(const Tensor& noise) { return layer(noise).tanh(); }
  nn::Linear layer = register_module("layer", nn::Linear(2, 4));
};

struct Critic : nn::Module {
  Tensor forward(const Tensor& x) { return last(first(x).tanh()); }
  nn::Linear first = register_module("first", nn::Linear(4, 6)), last = register_module("last", nn::Linear(6, 1));
};

TEST_P(UsersProgramsWorlds, TwoNetsAgainstEachOther) {
  torch::manual_seed(7);
  const Dataset data{doubles({12, 4}), torch::zeros({12}), {{"noise", doubles({12, 2})}}};
  const auto maker_alone = made<Maker>();
  const auto critic_alone = made<Critic>();
  torch::optim::SGD makers_alone(maker_alone->parameters(), sgd_options());
  torch::optim::SGD critics_alone(critic_alone->parameters(), sgd_options());
  for (const auto& batch : batches(data, {.size = 6})) {
    const Tensor fake = maker_alone->forward(batch["noise"]);
    critics_alone.zero_grad();
    (critic_alone->forward(fake.detach()) - critic_alone->forward(batch.x)).mean().backward();
    critics_alone.step();
    makers_alone.zero_grad();
    (-critic_alone->forward(fake)).mean().backward();
    makers_alone.step();
  }
  const ScratchFolder folder;
  on_ranks([&](Rank& rank) {
    DataParallel maker(rank.in_turn(made<Maker>), rank);
    DataParallel critic(rank.in_turn(made<Critic>), rank);
    torch::optim::SGD makers(maker->parameters(), sgd_options()), critics(critic->parameters(), sgd_options());
    for (const auto& batch : batches(data, {.size = 6}, rank)) {
      const Tensor fake = maker(batch["noise"]);
      critics.zero_grad();
      critic.mean((critic(fake.detach()) - critic(batch.x)).mean(), batch.size(), batch.global_size).backward();
      critics.step();
      makers.zero_grad();
      maker.mean((-critic(fake)).mean(), batch.size(), batch.global_size).backward();
      makers.step();
    }
    expect_same(*maker, *maker_alone);
    expect_same(*critic, *critic_alone);
    if (rank.index() != 0) return;
    torch::save(critic.module(), (folder / "critic.pt").string());
    auto loaded = made<Critic>();
    torch::load(loaded, (folder / "critic.pt").string());
    const Tensor x = data.x.to(rank.device());
    loaded->to(rank.device());
    EXPECT_TRUE(loaded->forward(x).equal(critic->forward(x)));
  });
}

// ---- A window with a button that cancels.

struct Outcome {
  std::shared_ptr<Critic> net;  // null: it was cancelled
  std::string error;
};

// Trains in the calling thread, over two ranks. Each rank asks is_cancelled() before each step, with its number.
Outcome trained_in_a_window(const Dataset& data, std::mutex& draws, const std::function<bool(int)>& is_cancelled) {
  Outcome outcome;
  try {
    run(test_devices(2), [&](Rank& rank) {
      const auto module = rank.in_turn([&] {
        const std::lock_guard lock(draws);  // all threads of the program share LibTorch's generator
        return made<Critic>();
      });
      DataParallel net(module, rank);
      torch::optim::SGD sgd(net->parameters(), sgd_options());
      int steps = 0;
      for (int epoch = 0; epoch < kEpochs; ++epoch) {
        for (const auto& batch : batches(data, {.size = 6, .epoch = epoch}, rank)) {
          if (rank.any(is_cancelled(steps++))) return;  // ranks look at different moments, and stop at one
          sgd.zero_grad();
          net.loss(batch, F::mse_loss).backward();
          sgd.step();
        }
      }
      if (rank.index() == 0) outcome.net = module;
    });
  } catch (const Error& error) {
    outcome.error = error.what();
  }
  return outcome;
}

TEST(UsersPrograms, AWindowTrainsInThreadsCancelsAndSurvivesAFailure) {
  torch::manual_seed(8);
  const Dataset data{doubles({12, 4}), doubles({12, 1})};
  const auto alone = on_one_device<Critic>(
      data, 6, [](Critic& net, const Batch& batch) { return F::mse_loss(net.forward(batch.x), batch.y); });
  std::mutex draws;
  std::atomic<bool> button = false;
  std::vector<Outcome> outcomes(4);
  std::vector<std::thread> windows;
  const std::vector<std::function<bool(int)>> ways = {
      [](int) { return false; }, [](int) { return false; },
      [&](int step) { return step == 2 ? (button = true) : button.load(); },
      [](int step) { return step == 1 ? throw std::runtime_error("no more room") : false; }};
  for (size_t i = 0; i < ways.size(); ++i)
    windows.emplace_back([&, i] { outcomes[i] = trained_in_a_window(data, draws, ways[i]); });
  for (auto& window : windows) window.join();
  for (const size_t whole : {0, 1}) {
    ASSERT_TRUE(outcomes[whole].net) << outcomes[whole].error;
    outcomes[whole].net->to(torch::kCPU);
    expect_same(*outcomes[whole].net, *alone);
  }
  EXPECT_FALSE(outcomes[2].net);
  EXPECT_EQ(outcomes[2].error, "");
  EXPECT_THAT(outcomes[3].error, testing::HasSubstr("no more room"));
}

}  // namespace users_programs_test
}  // namespace lockstep

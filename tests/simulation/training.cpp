#include "training.hpp"

#include <torch/torch.h>
#include <lockstep/data_parallel/data_parallel.hpp>

#include "base/scramble.hpp"
#include "data_parallel/twice_kept.hpp"
#include "plan.hpp"
#include "trainer/elastic.hpp"

#include <algorithm>
#include <cstring>
#include <memory>

namespace lockstep::simulation {
namespace {

constexpr int64_t kIn = 6, kOut = 40;
constexpr int64_t kGrain = 3;
constexpr int64_t kGrains = (kBatch + kGrain - 1) / kGrain;
using Runs = std::vector<int64_t>;

// Its weights come from no generator: that is one for all simulated processes. It has one layer, since most of what a
// run takes is LibTorch's calls, and two would find no more.
struct Net : torch::nn::Module {
  Net() {
    w = register_parameter("w", torch::sin(torch::arange(kIn * kOut, torch::kFloat)).mul_(0.3).view({kIn, kOut}));
    b = register_parameter("b", torch::zeros({kOut}));
  }
  torch::Tensor forward(const torch::Tensor& x) { return torch::addmm(b, x, w); }
  torch::Tensor w, b;
};

}  // namespace

uint64_t digest_of(const Parameters& parameters) {
  uint64_t digest = 0;
  for (const auto& [name, parameter] : parameters) {
    const auto* const data = static_cast<const char*>(parameter.const_data_ptr());
    for (size_t i = 0; i + 4 <= parameter.nbytes(); i += 4) {
      uint32_t word = 0;
      std::memcpy(&word, data + i, 4);
      digest = scramble(digest + word + kGolden);
    }
  }
  return digest;
}

StateDigest digest_of(const RunState& state) {
  Parameters parameters, others;
  for (const std::string name : {"w", "b"}) {
    for (const auto& found : state.tensors) {
      if (found.first == name) parameters.push_back(found);
    }
  }
  for (const auto& found : tensors_under("optimizer", state.tensors)) others.push_back(found);
  std::sort(others.begin(), others.end(), [](const auto& one, const auto& other) { return one.first < other.first; });
  return {digest_of(parameters), digest_of(others)};
}

// The first number of a sample is its own number.
Dataset training_set() {
  const int64_t count = kSteps * kBatch;
  auto x = torch::sin(torch::arange(count * kIn, torch::kFloat).mul_(0.7)).view({count, kIn});
  x.select(1, 0) = torch::arange(count, torch::kFloat);
  return {x, torch::cos(torch::arange(count * kOut, torch::kFloat).mul_(0.3)).view({count, kOut})};
}

namespace {

// One rank's network, optimizer and steps. With a stage of ZeRO the optimizer has a state, whose slices are kept twice.
class Training {
 public:
  Training(Rank& rank, Steps& steps, const Listener& listener, const RunState* state = nullptr, int zero_stage = 0)
      : rank_(rank), net_(made(state), rank, {.average = zero_stage == 0}), steps_(steps), listener_(listener) {
    for (const auto& item : net_->named_parameters()) parameters_.emplace_back(item.key(), item.value());
    done_ = state == nullptr ? 0 : static_cast<int>(state->steps);
    if (done_ > 0) {  // weights that it was given count like those of a step
      steps_.weights.resize(std::max(steps_.weights.size(), static_cast<size_t>(done_)));
      steps_.weights[done_ - 1] = digest_of(parameters_);
    }
    if (zero_stage == 0) {
      sgd_.emplace(net_->parameters(), /*lr=*/0.01);
      return;
    }
    const auto make = [](std::vector<torch::Tensor> slices) {
      return std::make_unique<torch::optim::SGD>(std::move(slices), torch::optim::SGDOptions(0.01).momentum(0.9));
    };
    sharded_.emplace(net_, make, ShardedOptions{.stage = zero_stage, .keep_twice = true});
    kept_.emplace(*sharded_);
    if (state == nullptr) return;
    sharded_->load_state(tensors_under("optimizer", state->tensors));
    kept_->set_updates(state->updates);
  }

  // Gives whether the training goes on.
  bool step(Batch& batch) {
    if (!listener_.before(done_)) return false;
    const auto numbers = batch.x.select(1, 0).to(torch::kLong).contiguous();
    batch.x.select(1, 0).mul_(0.01);
    sgd_ ? sgd_->zero_grad() : sharded_->zero_grad();
    if (batch.grain > 0) {
      compute_by_grains(batch);
    } else {
      net_.loss(batch, [](const auto& out, const auto& y) { return torch::mse_loss(out, y); }).backward();
    }
    update();
    is_computing_ = false;
    const size_t count = static_cast<size_t>(done_) + 1;
    steps_.weights.resize(count);
    steps_.samples.resize(count);
    steps_.weights.back() = digest_of(parameters_);
    const auto* const first = numbers.const_data_ptr<int64_t>();
    steps_.samples.back().assign(first, first + numbers.numel());
    if (++done_ % kBetweenCheckpoints == 0) keep();
    return true;
  }

  // As RankTrainer::state() and train() have it: all ranks give their slices of the optimizer's state to all.
  void keep() {
    if (!listener_.keep) return;
    RunState state{.epochs = 0, .steps = done_, .seconds = 1, .history = {}, .config = "{}", .tensors = parameters_};
    if (sharded_) put_under("optimizer", sharded_->state(), state.tensors);
    if (rank_.index() == 0) listener_.keep(state);
  }

  int done() const { return done_; }

  // As RankTrainer::resume_step() and kept_step() have it. Gives the runs of the next step's grains, or nothing.
  std::vector<int64_t> resume(std::optional<KeptStep> kept) {
    resumed_ = std::move(kept);
    return agreed_runs(resumed_, /*epoch=*/1, done_, done_ < kSteps ? kGrains : 0, rank_);
  }
  std::optional<KeptStep> kept_step() {
    if (!is_computing_) return std::exchange(resumed_, std::nullopt);
    if (kept_ && kept_->has_updated()) return std::nullopt;
    auto grains = net_.replica()->kept_grains();
    if (!grains) return std::nullopt;
    return KeptStep{.epoch = 1, .steps = done_, .grains = std::move(grains), .sums = {}};
  }

  // As RankTrainer::whole_steps() has it.
  RunState state() {
    const int done = done_ + (kept_ && is_within_step_ && kept_->has_updated() ? 1 : 0);
    RunState state{.epochs = 0, .steps = done, .seconds = 1, .history = {}, .config = "{}", .tensors = {}};
    if (kept_) {
      state.tensors = parameters_;
      put_pieces(*kept_, state);
      return state;
    }
    for (const auto& [name, parameter] : parameters_) state.tensors.emplace_back(name, parameter.detach().clone());
    return state;
  }

 private:
  void compute_by_grains(const Batch& batch) {
    net_.replica()->keep_grains();
    if (auto kept = std::exchange(resumed_, std::nullopt)) net_.replica()->resume(std::move(kept->grains));
    is_computing_ = true;
    net_.replica()->backward_by_grains(batch,
                                       [&](const Batch& grain) { return torch::mse_loss(net_(grain.x), grain.y); });
  }

  void update() {
    if (sgd_) {
      sgd_->step();
      return;
    }
    is_within_step_ = true;
    kept_->begin_step();
    kept_->prepare();
    rank_.any(false);  // they agree
    sharded_->step();
    is_within_step_ = false;
  }

  static Net made(const RunState* state) {
    Net net;
    const torch::NoGradGuard no_grad;
    if (state == nullptr) return net;
    auto parameters = net.named_parameters();
    for (const auto& [name, values] : state->tensors) {
      if (auto* const parameter = parameters.find(name)) parameter->copy_(values);
    }
    return net;
  }

  Rank rank_;
  DataParallel<Net> net_;
  std::optional<torch::optim::SGD> sgd_;
  std::optional<ShardedOptimizer> sharded_;  // or this one
  std::optional<TwiceKept> kept_;
  bool is_within_step_ = false;  // in an update with slices
  bool is_computing_ = false;    // in a step by grains
  std::optional<KeptStep> resumed_;
  Steps& steps_;
  const Listener& listener_;
  Parameters parameters_;
  int done_ = 0;
};

}  // namespace

void train(Rank& rank, const Dataset& data, Steps& steps, const Listener& listener) {
  Training training(rank, steps, listener);
  for (auto& batch : batches(data, {.size = kBatch, .seed = 5, .epoch = 1}, rank)) {
    if (!training.step(batch)) return;
  }
}

void train_elastic(Rank& rank, const Dataset& data, ElasticJob& job, Progress& progress, Steps& steps,
                   const Listener& listener) {
  const auto newer = job.newer();
  hand_over(progress.state, rank);
  if (rank.index() == 0) job.note_beginning();
  Training training(rank, steps, listener, progress.state ? &*progress.state : nullptr, progress.zero_stage);
  try {
    // As train() at the end of an epoch: whoever wrote may be gone before its checkpoint was written.
    const bool may_be_owed = job.generation() > 0 && training.done() > 0 && training.done() % kBetweenCheckpoints == 0;
    if (may_be_owed && rank.any(rank.index() == 0 && progress.kept < training.done())) training.keep();
    const auto runs = job.generation() > 0 ? training.resume(std::exchange(progress.kept_step, {})) : Runs();
    Batches all = batches(
        data,
        {.size = kBatch, .seed = 5, .epoch = 1, .shares = sizes_of(runs), .grain = kGrain, .start = training.done()},
        rank);
    auto batch = all.begin();
    all.set_shares({});
    for (; batch != all.end(); ++batch) {
      if (training.done() % 2 == 1 && rank.any(newer.stop_requested())) break;
      if (!training.step(*batch)) break;
    }
  } catch (...) {
    progress.state = training.state();
    progress.kept_step = training.kept_step();
    throw;
  }
  progress.state = training.state();
  progress.is_last = training.done() == kSteps;
}

}  // namespace lockstep::simulation

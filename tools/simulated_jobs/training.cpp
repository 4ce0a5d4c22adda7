#include "training.hpp"

#include <torch/torch.h>
#include <lockstep/data_parallel/data_parallel.hpp>

#include "base/scramble.hpp"
#include "optim/optimizer_state.hpp"
#include "plan.hpp"
#include "trainer/elastic.hpp"

#include <algorithm>
#include <cstring>
#include <memory>

namespace lockstep::simulation {
namespace {

constexpr int64_t kIn = 6, kOut = 40;
constexpr int64_t kGrain = 3;

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

// One rank's network, optimizer and steps. The optimizer has a state.
class Training {
 public:
  Training(Rank& rank, Steps& steps, const Listener& listener, const RunState* state = nullptr)
      : rank_(rank),
        net_(made(state), rank),
        sgd_(net_->parameters(), torch::optim::SGDOptions(/*lr=*/0.01).momentum(0.9)),
        steps_(steps),
        listener_(listener) {
    for (const auto& item : net_->named_parameters()) parameters_.emplace_back(item.key(), item.value());
    done_ = state == nullptr ? 0 : static_cast<int>(state->steps);
    if (done_ > 0) {  // weights that it was given count like those of a step
      steps_.weights.resize(std::max(steps_.weights.size(), static_cast<size_t>(done_)));
      steps_.weights[done_ - 1] = digest_of(parameters_);
    }
    if (state != nullptr) load_optimizer_state(sgd_, parameters_, tensors_under("optimizer", state->tensors));
  }

  // Gives whether the training goes on.
  bool step(Batch& batch) {
    if (!listener_.before(done_)) return false;
    const auto numbers = batch.x.select(1, 0).to(torch::kLong).contiguous();
    batch.x.select(1, 0).mul_(0.01);
    sgd_.zero_grad();
    net_.loss(batch, [](const auto& out, const auto& y) { return torch::mse_loss(out, y); }).backward();
    sgd_.step();
    const size_t count = static_cast<size_t>(done_) + 1;
    steps_.weights.resize(count);
    steps_.samples.resize(count);
    steps_.weights.back() = digest_of(parameters_);
    const auto* const first = numbers.const_data_ptr<int64_t>();
    steps_.samples.back().assign(first, first + numbers.numel());
    if (++done_ % kBetweenCheckpoints == 0) keep();
    return true;
  }

  // Does what RankTrainer::state() and train() do.
  void keep() {
    if (!listener_.keep) return;
    if (rank_.index() == 0) listener_.keep(state());
  }

  int done() const { return done_; }

  // Does what RankTrainer::whole_steps() does.
  RunState state() {
    RunState state{.epochs = 0, .steps = done_, .seconds = 1, .history = {}, .config = "{}", .tensors = {}};
    for (const auto& [name, parameter] : parameters_) state.tensors.emplace_back(name, parameter.detach().clone());
    put_under("optimizer", optimizer_state(sgd_, parameters_), state.tensors);
    return state;
  }

 private:
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
  torch::optim::SGD sgd_;
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
  Training training(rank, steps, listener, progress.state ? &*progress.state : nullptr);
  try {
    // The process that writes may be gone before its checkpoint was written, as in train() at an epoch's end.
    const bool may_be_owed = job.generation() > 0 && training.done() > 0 && training.done() % kBetweenCheckpoints == 0;
    if (may_be_owed && rank.any(rank.index() == 0 && progress.kept < training.done())) training.keep();
    for (auto& batch :
         batches(data, {.size = kBatch, .seed = 5, .epoch = 1, .grain = kGrain, .start = training.done()}, rank)) {
      if (training.done() % 2 == 1 && rank.any(newer.stop_requested())) break;
      if (!training.step(batch)) break;
    }
  } catch (...) {
    progress.state = training.state();
    throw;
  }
  progress.state = training.state();
  progress.is_last = training.done() == kSteps;
}

}  // namespace lockstep::simulation

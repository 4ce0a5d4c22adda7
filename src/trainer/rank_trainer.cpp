#include "rank_trainer.hpp"

#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/nn/functional/loss.h>
#include <lockstep/base/error.hpp>
#include <lockstep/data/parts.hpp>
#include <lockstep/data_parallel/check_replicas.hpp>
#include <lockstep/data_parallel/running_statistics.hpp>
#include <lockstep/data_parallel/sync_batch_norm.hpp>
#include <lockstep/devices/autocast.hpp>
#include <lockstep/split/clip_grad_norm.hpp>

#include "base/seconds_since.hpp"
#include "communication_options.hpp"
#include "devices/memory_format.hpp"
#include "models/module_state.hpp"
#include "optim/finite_sum.hpp"
#include "ranks/gather.hpp"
#include "ranks/rank_place.hpp"
#include "train_options.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

namespace lockstep {
namespace {

constexpr std::chrono::milliseconds kProgressInterval{100};

// Ranks that share a GPU compute at the same time only on different streams, and the default one cannot be recorded.
std::optional<c10::Stream> own_stream(const c10::Device& device) {
  if (device.is_cpu()) return std::nullopt;
  return c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device);
}

torch::nn::Sequential make_net(const TrainOptions& options, Rank& rank, const RunState* resumed) {
  torch::nn::Sequential net = make_model(model_options(options));
  if (resumed != nullptr) load_state(tensors_under("model", resumed->tensors), *net, "cannot resume");
  set_memory_format(*net, memory_format(options));
  if (options.sync_batchnorm) convert_sync_batchnorm(*net, rank);
  return net;
}

}  // namespace

Totals::Totals(const c10::Device& device)
    : loss(torch::zeros({}, torch::TensorOptions(device).dtype(torch::kDouble))),
      correct(torch::zeros({}, torch::TensorOptions(device).dtype(torch::kLong))) {}

void Totals::reset() {
  loss.zero_();
  correct.zero_();
}

void Totals::add_loss(const torch::Tensor& mean, int64_t samples) {
  const torch::NoGradGuard no_grad;
  loss.add_(mean.detach() * static_cast<double>(samples));
}

void Totals::add_correct(const torch::Tensor& logits, const torch::Tensor& y) {
  const torch::NoGradGuard no_grad;
  correct.add_((logits.argmax(1) == y).sum());
}

RankTrainer::RankTrainer(const TrainOptions& options, const TrainCallbacks& callbacks, const ImageData& data,
                         Rank& rank, Trace* trace, std::unique_ptr<Graph> graph, const RunState* resumed,
                         const BalanceOptions& balance)
    : options_(options),
      callbacks_(callbacks),
      rank_(rank),
      stream_(own_stream(rank.device())),
      traffic_(graph ? nullptr : std::make_shared<Traffic>()),
      counted_(traffic_ ? observed(rank, traffic_) : rank),
      hook_(make_communication_hook(options)),
      trace_(trace),
      train_(data.train.to(rank.device())),
      test_(data.test.to(rank.device())),
      net_(make_net(options, counted_, resumed), counted_, split_of(options, rank.world_size()),
           {.average = options.sync_every == 0 && options.zero_stage == 0, .hook = hook_}),
      counts_loss_(net_.mesh().pipeline().index() == 0 && net_.mesh().tensor().index() == 0),
      counts_correct_(net_.mesh().tensor().index() == 0),
      update_(options, net_.replicas()),
      totals_(rank.device()),
      step_loss_(torch::zeros({}, torch::TensorOptions(rank.device()).dtype(torch::kDouble))),
      ranks_differ_(!holds_whole() || options.zero_stage > 0 || options.sync_every > 0),
      exchange_recorded_(net_.mesh().data().backend().getBackendName() == "nccl"),
      shares_(shares_of(options)),
      stopping_(rank, callbacks.stop) {
  if (graph) {
    check_that_order_can_be_learnt();
    graphed_.emplace(rank, std::move(graph), global_batch(options), exchange_recorded_,
                     [this](const Batch& batch) { recorded_part(batch); });
  }
  if (options.sync_every > 0) {
    local_.emplace(net_.parameters(), net_.mesh().data(), local_sgd_options(options));
    // So that every optimizer has a state of every parameter, also of a rank that has had no samples yet.
    for (auto& parameter : net_.parameters()) parameter.mutable_grad() = torch::zeros_like(parameter);
  }
  if (balances(options)) balance_.emplace(net_.replicas(), net_.mesh().data(), balance);
  if (resumed != nullptr) restore(*resumed);
}

// In the steps before the recording; it takes an exchange of its own, which no graph can hold.
void RankTrainer::check_that_order_can_be_learnt() {
  if (!exchange_recorded_ || parts_of_full_batch()[0] > 0) return;
  throw Error(rank_.name() + ": `cuda_graph` records the exchange of gradients with the step, in the order in which " +
              "the first device's come, and with `balance` " + to_string(options_.balance) +
              " that one gets no samples of a " + "batch; give it a share, put it last, or leave `cuda_graph` out");
}

EpochMetrics RankTrainer::epoch(int number, const std::function<void()>& keep) {
  EpochMetrics metrics;
  metrics.epoch = number;
  train(number, metrics, keep);
  if (!not_finite_.empty()) return metrics;
  if (options_.check_replicas == -1) check_replicas(*net_.module(), net_.mesh().data());
  rank_.allreduce(totals_.loss);
  rank_.allreduce(totals_.correct);
  const torch::Tensor of_ranks =
      of_all_ranks(rank_, {bits_of(waited_), bits_of(metrics.bytes_per_step)}).view(torch::kDouble);
  const torch::Tensor waits = of_ranks.select(1, 0).contiguous();
  waits_.assign(waits.data_ptr<double>(), waits.data_ptr<double>() + waits.numel());
  metrics.bytes_per_step = of_ranks.select(1, 1).max().item<double>();
  metrics.data_wait = *std::max_element(waits_.begin(), waits_.end()) / metrics.seconds;
  const auto trained = static_cast<double>(train_.size() - left_out_);
  metrics.train_loss = totals_.loss.item<double>() / trained;
  metrics.train_accuracy = totals_.correct.item<double>() / trained;
  // What is evaluated, and kept, is one network.
  average_running_statistics(*net_.module(), net_.mesh().data(), samples_);
  metrics.test_accuracy = evaluate_now(/*to_the_end=*/static_cast<bool>(keep)).accuracy();
  return metrics;
}

void RankTrainer::train(int number, EpochMetrics& metrics, const std::function<void()>& keep) {
  if (stopping_.now()) throw Stopped();
  epoch_ = number;
  if (steps_ == 0) begin_epoch();
  int64_t to_skip = steps_;  // of before a resume
  StepProgress progress{.epoch = number, .total = train_.size()};
  net_.module()->train();
  rank_.barrier();
  synchronize(rank_.device());
  auto start = Clock::now();
  auto reported = start, asked = start;
  int64_t taken = 0;  // steps, of this rank since it began or went on
  double sent_before = traffic_ ? traffic_->sent : 0;
  const auto shift = [&](double seconds) {
    return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  };
  const BatchOptions sampling{
      .size = global_batch(options_), .seed = options_.seed, .epoch = number, .shares = shares_};
  Batches all = batches(train_, sampling, net_.mesh().data());
  if (balance_) balance_->leave_out();
  const auto keep_now = [&] {
    synchronize(rank_.device());
    seconds_ = seconds_since(start);
    const double sent = traffic_ ? traffic_->sent : 0;
    keep();
    if (traffic_) sent_before += traffic_->sent - sent;
    start = Clock::now() - shift(seconds_);  // the epoch's seconds are those of training
    if (balance_) balance_->leave_out();
  };
  for (auto& batch : all) {
    if (to_skip > 0) {
      --to_skip;
      progress.done += batch.global_size;
      asked = Clock::now();
      start = asked - shift(seconds_);
      if (balance_) balance_->leave_out();
      continue;
    }
    waited_ += seconds_since(asked);
    batch.x = batch.x.contiguous(memory_format(options_));
    metrics.lr = update_.set_time(number - 1 + static_cast<double>(steps_) / static_cast<double>(all.count()));
    net_.replicas().set_steps_done((number - 1) * all.count() + steps_);
    step(batch);
    if (!not_finite_.empty()) return;
    if (balance_ && balance_->step(batch, all)) shares_ = balance_->shares();
    ++steps_;
    comm::RankPlace::of(rank_).world().stepped((number - 1) * all.count() + steps_);
    ++taken;
    if (is_time_to_compare()) {
      const double sent = traffic_ ? traffic_->sent : 0;
      check_replicas(*net_.module(), net_.mesh().data());
      if (traffic_) sent_before += traffic_->sent - sent;
    }
    progress.done += batch.global_size;
    if (rank_.index() == 0 && (Clock::now() - reported > kProgressInterval || progress.done == progress.total)) {
      report(progress, start);
      reported = Clock::now();
    }
    if (progress.done < progress.total) {
      const bool stops = stopping_.after_step();
      const bool is_time = options_.checkpoint_every > 0 && steps_ % options_.checkpoint_every == 0;
      if (keep && (is_time || (stops && !local_))) {  // within a round of LocalSgd parameters differ
        settle();
        if (!not_finite_.empty()) return;
        keep_now();
      }
      if (stops) {
        rank_.barrier();  // the one that writes is done
        throw Stopped();
      }
    }
    asked = Clock::now();
  }
  settle();
  if (left_out_ == train_.size()) {  // the next epoch would begin with the same weights, and end so too
    not_finite_ =
        "epoch " + std::to_string(number) + ": every step was skipped, since its loss or gradients are not finite";
  }
  if (!not_finite_.empty()) return;
  if (local_) local_->synchronize();
  synchronize(rank_.device());
  rank_.barrier();
  metrics.seconds = seconds_since(start);
  if (traffic_ && taken > 0) metrics.bytes_per_step = (traffic_->sent - sent_before) / static_cast<double>(taken);
  if (options_.balance != BalanceRule()) metrics.parts = parts_of_full_batch();
  steps_ = 0;
}

// Within a round of LocalSgd parameters differ.
bool RankTrainer::is_time_to_compare() const {
  return options_.check_replicas > 0 && steps_ % options_.check_replicas == 0 &&
         (options_.sync_every == 0 || steps_ % options_.sync_every == 0);
}

std::vector<int64_t> RankTrainer::parts_of_full_batch() {
  const std::vector<double> equal(static_cast<size_t>(net_.mesh().data().world_size()), 1.0);
  return sizes_by_shares(global_batch(options_), shares_.empty() ? equal : shares_);
}

void RankTrainer::begin_epoch() {
  totals_.reset();
  samples_ = 0;
  left_out_ = 0;
  seconds_ = 0;
  waited_ = 0;
}

void RankTrainer::step(const Batch& batch) {
  if (trace_ != nullptr) trace_->before_step(rank_);
  if (options_.on_nan == OnNan::skip) return step_or_skip(batch);
  if (graphed_ && graphed_->replay(batch)) {
    part_after_recorded(batch);
    watch();
  } else {
    update_.zero_grad();
    in_parts(batch);
    watch();
    if (!not_finite_.empty()) return;
    update();
  }
  samples_ += batch.size();
}

void RankTrainer::step_or_skip(const Batch& batch) {
  const torch::NoGradGuard no_grad;
  std::vector<std::pair<torch::Tensor, torch::Tensor>> before;
  const auto keep = [&](const torch::Tensor& tensor) { before.emplace_back(tensor, tensor.clone()); };
  keep(totals_.loss);
  keep(totals_.correct);
  for (const auto& buffer : net_.module()->buffers()) keep(buffer);
  {
    const torch::AutoGradMode grad(true);
    update_.zero_grad();
    in_parts(batch);
  }
  const std::string wrong = what_is_not_finite(watched_step());
  if (wrong.empty()) {
    update();
    samples_ += batch.size();
    return;
  }
  for (auto& [tensor, value] : before) tensor.copy_(value);
  if (left_out_ == 0 && rank_.index() == 0 && callbacks_.on_warning) {
    callbacks_.on_warning(wrong + "; the step was skipped, as are others like it in this epoch");
  }
  left_out_ += batch.global_size;
}

// What this step is judged by. Averaged gradients are the same on all ranks, and so is what follows from them; ranks
// that step with others ask each other. A loss that is not finite is in its gradients: see forward_backward().
RankTrainer::Watched RankTrainer::watched_step() {
  Watched step{.number = steps_ + 1,
               .sum = finite_sum(update_.sharded() ? update_.sharded()->gradients() : gradients_of(net_.parameters()),
                                 rank_.device()),
               .loss = step_loss_.clone()};
  step_loss_.zero_();
  return step;
}

// With LocalSgd ranks learn of each other when a round ends, and a GPU is not waited for: then the next step asks.
void RankTrainer::watch() {
  if (options_.on_nan == OnNan::go_on) return;
  Watched step = watched_step();
  if (local_) {
    if (watched_) {
      step.sum += watched_->sum;
      step.loss += watched_->loss;
    }
    watched_ = std::move(step);
    if ((steps_ + 1) % options_.sync_every == 0) settle();
    return;
  }
  if (!rank_.device().is_cpu()) {
    settle();
    watched_ = std::move(step);
    return;
  }
  not_finite_ = what_is_not_finite(step);
}

void RankTrainer::settle() {
  if (!watched_) return;
  const Watched step = *std::exchange(watched_, std::nullopt);
  not_finite_ = what_is_not_finite(step);
}

// Empty if nothing is. All ranks must ask, and get the same answer.
std::string RankTrainer::what_is_not_finite(const Watched& step) {
  if (ranks_differ_) rank_.allreduce(step.sum);
  if (std::isfinite(step.sum.item<double>())) return "";
  const torch::Tensor finite = of_all_ranks(rank_, {std::isfinite(step.loss.item<double>()) ? 1 : 0});
  std::string ranks;
  for (int64_t rank = 0; rank < finite.size(0); ++rank) {
    if (finite[rank][0].item<int64_t>() == 0) ranks += (ranks.empty() ? "" : ", ") + std::to_string(rank);
  }
  return "epoch " + std::to_string(epoch_) + ", step " + std::to_string(step.number) + ": " +
         (ranks.empty() ? "the gradients are not finite, though the loss is, on every rank"
                        : "the loss of rank " + ranks + " is not finite");
}

// A graph holds the whole step if nothing is exchanged, or if the exchange can be recorded with it: NCCL's can, and so
// stays beside backward. Our own exchange is agreed between host threads, and kernels of several ranks' graphs cannot
// wait for each other; it follows the replay, with the update behind it (docs/decisions/0008).
void RankTrainer::recorded_part(const Batch& batch) {
  update_.zero_grad();
  if (exchange_recorded_) {
    forward_backward(batch);
    return update();
  }
  const auto guard = net_.replicas().no_sync();
  forward_backward(batch);
  if (rank_.world_size() == 1) update();
}

void RankTrainer::part_after_recorded(const Batch& batch) {
  if (exchange_recorded_ || rank_.world_size() == 1) return;
  net_.replicas().backward_through([] {});  // adds nothing to the gradients, and averages them
  update();
}

// What the parts' backwards add up to is averaged over the ranks while the last of them computes.
void RankTrainer::in_parts(const Batch& batch) {
  const int64_t parts = std::min<int64_t>(options_.accumulate, batch.size());
  if (parts <= 1) return forward_backward(batch);
  const auto all = batch.in_parts(parts);
  for (size_t part = 0; part < all.size(); ++part) {
    std::optional<NoSync> more_to_come;
    if (part + 1 < all.size()) more_to_come.emplace(net_.replicas().replica());
    forward_backward(all[part]);
  }
}

void RankTrainer::forward_backward(const Batch& batch) {
  const Autocast precision(rank_.device(), torch::kBFloat16, computes_in_bf16(options_));
  const auto criterion = [&](const torch::Tensor& logits, const torch::Tensor& y) {
    // With recomputation a microbatch's loss may be computed twice, of which only one is for a backward.
    if (counts_correct_ && c10::GradMode::is_enabled()) totals_.add_correct(logits, y);
    const torch::Tensor loss = torch::nn::functional::cross_entropy(logits, y);
    // Times 1, or NaN: gradients are not finite where the loss is not.
    return options_.on_nan == OnNan::go_on ? loss : loss * (1 + 0 * loss.detach());
  };
  const torch::Tensor mean = net_.forward_backward(batch, criterion);
  step_loss_.add_(mean);
  if (counts_loss_) totals_.add_loss(mean, batch.size());
}

void RankTrainer::update() {
  RECORD_USER_SCOPE("lockstep::update");
  if (options_.clip > 0) clip_grad_norm(net_, options_.clip);
  update_.step();
  if (local_) local_->step();
}

void RankTrainer::report(StepProgress& progress, Clock::time_point start) const {
  if (!callbacks_.on_step) return;
  progress.seconds = seconds_since(start);
  progress.loss = samples_ == 0 ? 0.0 : totals_.loss.item<double>() / static_cast<double>(samples_);
  callbacks_.on_step(progress);
}

// With a checkpoint to come an evaluation ends before the run does: or else the epoch's training would be lost.
Score RankTrainer::evaluate_now(bool to_the_end) {
  net_.module()->eval();
  return evaluate(
      [&](const torch::Tensor& x) {
        if (!to_the_end && callbacks_.stop.stop_requested()) throw Stopped();
        const Autocast precision(rank_.device(), torch::kBFloat16, computes_in_bf16(options_));
        // float32: for the loss of a whole batch
        return net_.forward(x.contiguous(memory_format(options_))).to(torch::kFloat);
      },
      test_, net_.mesh().data());
}

bool RankTrainer::holds_whole() {
  return net_.mesh().shape().size() == net_.mesh().shape().data;
}

torch::nn::Sequential RankTrainer::whole() {
  if (holds_whole()) return net_.module();
  auto net = new_net();
  net_.gather(net);
  return net;
}

torch::nn::Sequential RankTrainer::new_net() const {
  return make_model(model_options(options_));
}

}  // namespace lockstep

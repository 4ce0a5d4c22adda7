#include "rank_trainer.hpp"

#include <lockstep/base/error.hpp>
#include <lockstep/data_parallel/check_replicas.hpp>
#include <lockstep/data_parallel/running_statistics.hpp>
#include <lockstep/data_parallel/sync_batch_norm.hpp>
#include <lockstep/devices/memory_format.hpp>

#include "batch_settings.hpp"
#include "devices/device_streams.hpp"
#include "evaluation.hpp"
#include "exchange_options.hpp"
#include "grain.hpp"
#include "models/module_state.hpp"
#include "ranks/gather.hpp"
#include "ranks/rank_place.hpp"
#include "ranks/rank_wait.hpp"
#include "train_options.hpp"

#include <algorithm>
#include <utility>

namespace lockstep {
namespace {

constexpr std::chrono::milliseconds kProgressInterval{100};

// Ranks that share a GPU compute at the same time only on different streams. And the default stream cannot be recorded.
std::optional<c10::Stream> own_stream(const c10::Device& device) {
  if (device.is_cpu()) return std::nullopt;
  return stream_beside(device);
}

torch::nn::Sequential make_net(const TrainOptions& options, Rank& rank, const RunState* resumed) {
  torch::nn::Sequential net = make_model(options.model, options.seed);
  if (resumed != nullptr) load_state(tensors_under("model", resumed->tensors), *net, "cannot resume");
  set_memory_format(*net, memory_format(options));
  if (options.sync_batchnorm) convert_sync_batchnorm(*net, rank);
  return net;
}

}  // namespace

RankTrainer::RankTrainer(const TrainOptions& options, const TrainCallbacks& callbacks, const ImageData& data,
                         Rank& rank, Trace* trace, std::unique_ptr<Graph> graph, const RunState* resumed,
                         const BalanceOptions& balance)
    : options_(options),
      callbacks_(callbacks),
      rank_(rank),
      stream_(own_stream(rank.device())),
      traffic_(rank, /*counts=*/!graph),
      hook_(make_communication_hook(options.exchange, options.seed)),
      trace_(trace),
      train_(data.train.to(rank.device())),
      test_(data.test.to(rank.device())),
      net_(make_net(options, traffic_.rank(), resumed), traffic_.rank(), split_of(options, rank.world_size()),
           {.average = options.exchange.sync_every == 0 && options.exchange.zero_stage == 0, .hook = hook_}),
      update_(options, net_),
      watch_(options, rank, update_,
             /*ranks_differ=*/!holds_whole() || options.exchange.zero_stage > 0 || options.exchange.sync_every > 0),
      totals_(rank.device()),
      step_(make_step({options_, callbacks_, rank_, net_, update_, totals_, watch_}, std::move(graph))),
      shares_(shares_of(options.batch)),
      stopping_(rank, callbacks.stop) {
  if (balances(options.batch)) balance_.emplace(net_.replicas(), net_.mesh().data(), balance);
  if (resumed != nullptr) restore(*resumed);
  const std::string idle = remark_on_idle_ranks(options.batch, net_.mesh().data().world_size());
  if (!idle.empty() && rank.index() == 0 && callbacks.on_warning) callbacks.on_warning(idle);
}

EpochMetrics RankTrainer::epoch(int number, const Keep& keep) {
  EpochMetrics metrics;
  metrics.epoch = number;
  train(metrics, keep);
  if (regroups_ || !not_finite().empty()) return metrics;
  if (options_.check_replicas == -1) check_replicas(*net_.module(), net_.mesh().data());
  const double losses = sum_of_losses();
  rank_.allreduce(totals_.correct);
  const torch::Tensor of_ranks =
      of_all_ranks(rank_, {bits_of(clock_.waited()), bits_of(metrics.bytes_per_step)}).view(torch::kDouble);
  const torch::Tensor waits = of_ranks.select(1, 0).contiguous();
  waits_.assign(waits.data_ptr<double>(), waits.data_ptr<double>() + waits.numel());
  metrics.bytes_per_step = of_ranks.select(1, 1).max().item<double>();
  metrics.data_wait = *std::max_element(waits_.begin(), waits_.end()) / metrics.seconds;
  const auto trained = static_cast<double>(train_.size() - totals_.left_out);
  metrics.train_loss = losses / trained;
  metrics.train_accuracy = totals_.correct.item<double>() / trained;
  // What is evaluated, and kept, is one network. With a grain it is one already.
  if (options_.batch.grain == 0) average_running_statistics(*net_.module(), net_.mesh().data(), totals_.samples);
  metrics.test_accuracy = evaluate_now(/*to_the_end=*/static_cast<bool>(keep)).accuracy();
  whole_steps_ = 0;
  return metrics;
}

double RankTrainer::sum_of_losses() {
  if (options_.batch.grain > 0) return totals_.grain_losses.sum(rank_);
  rank_.allreduce(totals_.loss);
  return totals_.loss.item<double>();
}

void RankTrainer::train(EpochMetrics& metrics, const Keep& keep) {
  begin_epoch();
  if (regroups_) return;
  const int done = metrics.epoch - 1;  // epochs
  Batches all = batches(train_,
                        {.size = options_.batch.global(),
                         .seed = options_.seed,
                         .epoch = metrics.epoch,
                         .shares = shares_,
                         .grain = options_.batch.grain},
                        net_.mesh().data());
  auto batch = first_of(all);
  StepProgress progress{.epoch = metrics.epoch,
                        .done = std::min(steps_ * options_.batch.global(), train_.size()),
                        .total = train_.size()};
  for (; batch != all.end(); ++batch) {
    clock_.batch_came();
    batch->x = batch->x.contiguous(memory_format(options_));
    metrics.lr = update_.set_time(done + static_cast<double>(steps_) / static_cast<double>(all.count()));
    net_.replicas().set_steps_done(done * all.count() + steps_);
    ++steps_;
    if (trace_ != nullptr) trace_->before_step(rank_);
    watch_.begin_step(metrics.epoch, steps_);
    run_step(*batch);
    if (!not_finite().empty()) return;
    if (balance_ && balance_->step(*batch, all)) shares_ = balance_->shares();
    comm::RankPlace::of(rank_).world().stepped(done * all.count() + steps_);
    traffic_.step_done();
    compare_replicas();
    progress.done += batch->global_size;
    report(progress);
    if (progress.done < progress.total) keep_or_stop(keep);
    if (!not_finite().empty()) return;
    if (regrouping_ && progress.done < progress.total && regrouping_->after_step()) {
      regroups_ = true;
      return;
    }
    clock_.step_done();
  }
  end_epoch(metrics);
}

// A step that another rank's loss has ended may have changed the buffers. All else changes last.
void RankTrainer::run_step(const Batch& batch) {
  if (!regrouping_) return step_->run(batch);
  buffers_.clear();
  for (const auto& buffer : net_.module()->buffers()) buffers_.push_back(buffer.clone());
  is_within_step_ = true;
  step_->run(batch);
  is_within_step_ = false;
  whole_steps_ = steps_;
}

void RankTrainer::begin_epoch() {
  if (stops_ || stopping_.now()) throw Stopped("stopped by request");
  regroups_ = regrouping_ && regrouping_->now();
  if (regroups_) return;
  if (steps_ == 0) {
    totals_.reset();
    clock_.reset();
  }
  whole_.reset();
  net_.module()->train();
  rank_.barrier();
  synchronize(rank_);
  traffic_.begin();
  reported_ = Clock::now();
  go_on();
}

// The next step's time begins here.
void RankTrainer::go_on() {
  clock_.start();
  if (balance_) balance_->leave_out();
}

// The batch behind those of the steps that a resumed run has done.
Batches::Iterator RankTrainer::first_of(const Batches& all) {
  auto batch = all.begin();
  for (int64_t step = 0; step < steps_; ++step) {
    go_on();
    ++batch;
  }
  return batch;
}

void RankTrainer::compare_replicas() {
  if (options_.check_replicas <= 0 || steps_ % options_.check_replicas != 0 || within_round()) return;
  traffic_.leave_out([&] { check_replicas(*net_.module(), net_.mesh().data()); });
}

void RankTrainer::report(StepProgress& progress) {
  if (rank_.index() != 0 || !callbacks_.on_step) return;
  if (Clock::now() - reported_ <= kProgressInterval && progress.done < progress.total) return;
  progress.seconds = clock_.seconds();
  synchronize(rank_);
  progress.loss = totals_.mean_loss();
  callbacks_.on_step(progress);
  reported_ = Clock::now();
}

// With local SGD the ranks' parameters differ within a round, so nothing is compared or kept there.
bool RankTrainer::within_round() const {
  return options_.exchange.sync_every > 0 && steps_ % options_.exchange.sync_every != 0;
}

// Between two steps. The epoch's seconds are those of training alone.
void RankTrainer::keep_or_stop(const Keep& keep) {
  stops_ = stops_ || stopping_.after_step();
  if (keep && within_round()) return;
  const bool is_time = options_.keep.every > 0 && steps_ % options_.keep.every == 0;
  if (keep && (is_time || stops_)) {
    watch_.settle();
    if (!not_finite().empty()) return;
    synchronize(rank_);
    clock_.pause();
    traffic_.leave_out([&] {
      const auto whole = update_.whole();
      keep();
    });
    go_on();
  }
  if (stops_) {
    rank_.barrier();  // the one that writes is done
    throw Stopped("stopped by request");
  }
}

void RankTrainer::end_epoch(EpochMetrics& metrics) {
  watch_.settle();
  if (totals_.left_out == train_.size()) {  // the next epoch would begin with the same weights, and end so too
    watch_.give_up("epoch " + std::to_string(metrics.epoch) +
                   ": every step was skipped, since its loss or gradients are not finite");
  }
  if (!not_finite().empty()) return;
  update_.synchronize();
  synchronize(rank_);
  rank_.barrier();
  metrics.seconds = clock_.seconds();
  metrics.bytes_per_step = traffic_.per_step();
  whole_ = update_.whole();  // to evaluate and to keep
  if (options_.batch.balance != BalanceRule()) {
    metrics.parts = parts_of_full_batch(options_.batch, shares_, net_.mesh().data().world_size());
  }
  steps_ = 0;
}

// If a checkpoint follows, the evaluation is finished before the run stops. Otherwise the epoch's training would be
// lost.
Score RankTrainer::evaluate_now(bool to_the_end) {
  net_.module()->eval();
  const auto forward = [&](const torch::Tensor& x) {
    if (!to_the_end && callbacks_.stop.stop_requested()) throw Stopped("stopped by request");
    return net_.forward(x);
  };
  constexpr int64_t batch_size = 256;
  return evaluate(evaluation_forward(options_, rank_.device(), forward), test_, net_.mesh().data(), batch_size,
                  options_.batch.grain);
}

bool RankTrainer::holds_whole() {
  return net_.mesh().shape().size() == net_.mesh().shape().data;
}

torch::nn::Sequential RankTrainer::whole() {
  if (holds_whole()) return net_.module();
  auto net = make_model(options_.model, options_.seed);
  net_.gather(net);
  return net;
}

}  // namespace lockstep

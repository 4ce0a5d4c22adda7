#include "rank_trainer.hpp"

#include <c10/core/CachingDeviceAllocator.h>
#include <sys/resource.h>
#include <lockstep/base/error.hpp>
#include <lockstep/data_parallel/convert_sync_batchnorm.hpp>
#include <lockstep/data_parallel/running_statistics.hpp>
#include <lockstep/devices/memory_format.hpp>
#include <lockstep/lab/check_arithmetic.hpp>

#include "base/rank_thread.hpp"
#include "batch_settings.hpp"
#include "data_parallel/replica.hpp"
#include "data_parallel/replica_check.hpp"
#include "devices/gpu_math.hpp"
#include "evaluation.hpp"
#include "flat_options.hpp"
#include "io/safetensors.hpp"
#include "measures.hpp"
#include "nn/module_state.hpp"
#include "ranks/gather.hpp"
#include "ranks/rank_place.hpp"
#include "ranks/rank_wait.hpp"
#include "train_options.hpp"

#include <algorithm>
#include <bit>
#include <limits>
#include <utility>

namespace lockstep {
namespace {

constexpr std::chrono::milliseconds kProgressInterval{100};
constexpr double kNotCounted = std::numeric_limits<double>::quiet_NaN();

// Checks this early: otherwise the first epoch's end would tell, after all its steps.
void check_can_be_kept(const torch::nn::Module& module, const std::filesystem::path& run_dir, const Rank& rank) {
  if (run_dir.empty()) return;
  const std::string why = io::what_a_file_lacks(state_of(module));
  if (why.empty()) return;
  throw Error(rank.name() + ": the run cannot be kept in " + run_dir.string() + ": " + why +
                  "; give it another type, or train without a folder (`run_dir`)",
              {.options = {"module", "run_dir"}});
}

DataParallelOptions net_options(const FlatOptions& options, const std::shared_ptr<CommunicationHook>& hook) {
  return {.average = options.local.sync_every == 0,
          .hook = hook,
          .sharded = static_cast<Sharded>(options.zero_stage),
          .grain_check = options.check_arithmetic > 0 ? check_arithmetic(options.check_arithmetic) : nullptr};
}

MadeModule make_net(const TrainOptions& options, const Task& task, Rank& rank, const RunState* resumed) {
  MadeModule made = task.module(rank, options.seed);
  const auto split = flat(options).split;
  if (made.module && split && (split->stages() > 1 || split->mesh.tensor > 1)) {
    throw Error(rank.name() + ": a split by layers or channels (" + to_string(*split) +
                    ") needs a torch::nn::Sequential, and \"" + task.name + "\" is none; split it by data alone",
                {.options = {"split"}});
  }
  check_can_be_kept(*made.whole(), options.keep.run_dir, rank);
  if (resumed != nullptr) load_state(tensors_under("model", resumed->tensors), *made.whole(), "cannot resume");
  set_memory_format(*made.layers, memory_format(options));
  if (options.sync_batchnorm && convert_sync_batchnorm(*made.layers, rank) == 0) {
    throw Error(rank.name() + ": `sync_batchnorm`: \"" + task.name + "\" has no BatchNorm; leave it out",
                {.options = {"sync_batchnorm"}});
  }
  return made;
}

// Gives the most bytes that a device, or a CPU rank's process, has taken so far; 0 where nobody counts them.
int64_t peak_memory(const c10::Device& device) {
  rusage usage{};
  if (device.is_cpu()) return getrusage(RUSAGE_SELF, &usage) == 0 ? usage.ru_maxrss * 1024 : 0;
  auto* const allocator = dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(device.type()));
  if (allocator == nullptr || !allocator->initialized()) return 0;
  return allocator->getDeviceStats(device.index()).allocated_bytes[0].peak;  // 0: of all its pools together
}

// A recorded step makes no calls. On a GPU a Balance watches the backwards, so that nobody sees their waits.
bool shows_waits(const TrainOptions& options, const c10::Device& device, bool is_recorded) {
  return !is_recorded && (device.is_cpu() || !balances(options.batch));
}

}  // namespace

RankTrainer::RankTrainer(const TrainOptions& options, const TrainCallbacks& callbacks, const Task& task, Rank& rank,
                         Trace* trace, std::unique_ptr<Graph> graph, const RunState* resumed,
                         const BalanceOptions& balance)
    : options_(options),
      callbacks_(callbacks),
      task_(task),
      wait_clock_(shows_waits(options, rank.device(), graph != nullptr) ? std::make_shared<WaitClock>(rank.device())
                                                                        : nullptr),
      rank_(observed(rank, {wait_clock_})),
      traffic_(rank, /*counts=*/!graph, wait_clock_),
      hook_(make_communication_hook(options)),
      trace_(trace),
      train_(task.train.to(rank.device())),
      test_(task.test.to(rank.device())),
      made_(make_net(options, task, traffic_.rank(), resumed)),
      net_(made_.layers, traffic_.rank(), split_of(options, rank.world_size()), net_options(flat(options), hook_),
           made_.takes_batch),
      update_(options, net_, task, made_.module.get()),
      totals_(rank.device(), net_.mesh().pipeline().index() == 0 && net_.mesh().tensor().index() == 0),
      watch_(options, rank_, update_, totals_.loss,
             /*ranks_differ=*/!holds_whole() || flat(options).zero_stage > 0 || flat(options).local.sync_every > 0),
      replicas_(options, net_, update_, traffic_),
      step_(
          make_step({task_, options_, callbacks_, rank_, net_, update_, totals_, watch_, replicas_}, std::move(graph))),
      shares_(shares_of(options.batch)),
      stopping_(rank_, callbacks.stop) {
  made_.layers = nullptr;  // the layers of other ranks are among them
  update_.skip_where(watch_.found(), options.on_nan == OnNan::skip);
  if (auto* const averaging = update_.part()->averaging()) averaging->leave_comparing();  // replicas_ compares
  if (balances(options.batch)) balance_.emplace(Replicas(update_.part()), net_.mesh().data(), balance);
  watch_waits_of_gpu();
  if (resumed != nullptr) restore(*resumed);
  const auto warn = [&](const std::string& remark) {
    if (!remark.empty() && rank.index() == 0 && callbacks.on_warning) callbacks.on_warning(remark);
  };
  warn(remark_on_idle_ranks(options.batch, net_.mesh().data().world_size()));
  if (!running_statistics_of(update_.part()->module()).empty())
    warn(remark_on_last_batch(options.batch, train_.size(), net_.mesh().data().world_size()));
  if (flat(options).check_arithmetic > 0 && rank.world_size() == 1)
    warn("`check_arithmetic` has grains computed again by another rank, and there is none; nothing is checked");
}

EpochMetrics RankTrainer::epoch(int number, const Keep& keep) {
  EpochMetrics metrics;
  metrics.epoch = number;
  train(metrics, keep);
  if (regroups_ || !not_finite().empty()) return metrics;
  replicas_.end_epoch();
  const double losses = sum_of_losses();
  const torch::Tensor correct = totals_.correct();
  rank_.allreduce(correct);
  const torch::Tensor of_ranks =
      of_all_ranks(rank_, {bits_of(clock_.waited()), bits_of(metrics.bytes_per_step), bits_of(own_time_.seconds),
                           bits_of(static_cast<double>(own_time_.samples)), bits_of(own_wait_),
                           bits_of(static_cast<double>(peak_memory(rank_.device())))})
          .view(torch::kDouble);
  metrics.bytes_per_step = of_ranks.select(1, 1).max().item<double>();
  add_times(of_ranks, metrics);
  metrics.data_wait = of_ranks.select(1, 0).max().item<double>() / metrics.seconds;
  const auto trained = static_cast<double>(samples_of_epoch() - totals_.left_out);
  metrics.train_loss = losses / trained;
  metrics.train_accuracy = task_.accuracy ? correct.item<double>() / trained : kNotCounted;
  // The ranks must evaluate and keep the same network. With a grain all have it already.
  if (!options_.batch.grain) average_running_statistics(net_, totals_.samples);
  show();
  evaluate_now(metrics, /*to_the_end=*/static_cast<bool>(keep));
  whole_steps_ = 0;
  return metrics;
}

// With a hook or a grain, a backward's waits after its own part is queued go over several streams.
void RankTrainer::watch_waits_of_gpu() {
  const auto& replica = update_.part();
  if (!wait_clock_ || rank_.device().is_cpu() || !replica->averaging() || replica->divides_gradients()) return;
  replica->backwards().watch([clock = wait_clock_] { clock->hold(); }, [clock = wait_clock_] { clock->release(); });
}

void RankTrainer::add_times(const torch::Tensor& of_ranks, EpochMetrics& metrics) {
  times_.resize(static_cast<size_t>(of_ranks.size(0)));
  for (size_t rank = 0; rank < times_.size(); ++rank) {
    const torch::Tensor row = of_ranks[static_cast<int64_t>(rank)];
    times_[rank].seconds += row[2].item<double>();
    times_[rank].samples += static_cast<int64_t>(row[3].item<double>());
    metrics.ranks.push_back({.data_wait = row[0].item<double>(),
                             .rank_wait = row[4].item<double>(),
                             .memory = static_cast<int64_t>(row[5].item<double>())});
  }
  ++timed_epochs_;
}

std::string RankTrainer::straggler() {
  return straggler_of(times_, timed_epochs_, names_of_ranks(), split_of(options_, rank_.world_size()));
}

std::vector<std::string> RankTrainer::names_of_ranks() const {
  std::vector<std::string> names;
  for (int rank = 0; rank < rank_.world_size(); ++rank)
    names.push_back(comm::name_of(rank, comm::RankPlace::of(rank_).run->devices));
  return names;
}

RankLayout RankTrainer::layout() {
  std::string tensors;
  for (const auto& parameter : update_.part()->module().named_parameters()) {
    tensors += parameter.key();
    for (const int64_t size : parameter.value().sizes()) tensors += " " + std::to_string(size);
    tensors += "\n";
  }
  const ModelSplit split = split_of(options_, rank_.world_size());
  return {.names = names_of_ranks(),
          .split = split,
          .samples = parts_of_full_batch(options_.batch, shares_, split.mesh.data),
          .tensors = holds_whole() ? std::vector{tensors} : texts_of_all_ranks(tensors, rank_)};
}

int64_t RankTrainer::samples_of_epoch() const {
  return lockstep::samples_of_epoch(options_.batch, train_.size());
}

double RankTrainer::sum_of_losses() {
  if (options_.batch.grain) return totals_.grain_losses.sum(rank_);
  const torch::Tensor sum = totals_.loss_that_counts();
  rank_.allreduce(sum);
  return sum.item<double>();
}

void RankTrainer::train(EpochMetrics& metrics, const Keep& keep) {
  begin_epoch();
  if (regroups_) return;
  const int done = metrics.epoch - 1;  // finished epochs
  Batches all = batches(train_,
                        {.size = options_.batch.global(),
                         .drop_last = options_.batch.drop_last,
                         .seed = options_.seed,
                         .epoch = metrics.epoch,
                         .shares = shares_,
                         .grain = grain_of(options_.batch),
                         .start = steps_},
                        net_.mesh().data());
  if (const auto numbers = step_->numbers()) RowNumbers::give(all, numbers);
  auto batch = all.begin();
  const auto set_time_of_step = [&](int64_t step) {
    metrics.lr = update_.set_time(done + static_cast<double>(step) / static_cast<double>(all.count()));
  };
  if (steps_ == all.count()) set_time_of_step(steps_ - 1);  // only the epoch's evaluation is left
  StepProgress progress{.epoch = metrics.epoch,
                        .done = std::min(steps_ * options_.batch.global(), samples_of_epoch()),
                        .total = samples_of_epoch()};
  for (; batch != all.end(); ++batch) {
    clock_.batch_came();
    batch->x = batch->x.contiguous(memory_format(options_));
    set_time_of_step(steps_);
    if (task_.before_step) call_before_step(metrics, all.count());
    net_.set_steps_done(done * all.count() + steps_);
    ++steps_;
    if (trace_ != nullptr) trace_->before_step(rank_);
    watch_.begin_step(metrics.epoch, steps_);
    replicas_.begin_step(steps_);
    run_step(*batch);
    if (!not_finite().empty()) return;
    if (balance_ && balance_->step(*batch, all)) shares_ = balance_->shares();
    comm::RankPlace::of(rank_).world().stepped(done * all.count() + steps_);
    traffic_.step_done();
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

void RankTrainer::call_before_step(EpochMetrics& metrics, int64_t steps) {
  const auto loss = [this] {
    synchronize(rank_);
    return totals_.mean_loss();
  };
  const auto whole_net = [this] {
    if (!all_parameters_) all_parameters_.emplace(update_.part());
    return whole();
  };
  traffic_.leave_out([&] {
    const InUserCode here("before_step of \"" + task_.name + "\"");
    task_.before_step({metrics.epoch, steps_, steps, rank_, net_, update_.optimizer(), loss, whole_net});
  });
  all_parameters_.reset();
  if (!update_.part()->module().is_training()) net_.train();
  const int64_t step = (metrics.epoch - 1) * steps + steps_ + 1;
  if (std::has_single_bit(static_cast<uint64_t>(step))) update_.optimizer().compare_options();
  metrics.lr = update_.optimizer().param_groups().at(0).options().get_lr();
  if (balance_) balance_->leave_out();
}

// A step that another rank's loss has ended may have changed the buffers. All other state changes last.
void RankTrainer::run_step(const Batch& batch) {
  search_algorithms_if(batch.global_size == options_.batch.global());
  if (!regrouping_) return step_->run(batch);
  buffers_.clear();
  for (const auto& buffer : update_.part()->module().buffers()) buffers_.push_back(buffer.clone());
  is_within_step_ = true;
  step_->run(batch);
  if (!not_finite().empty()) return;  // this step has no update
  is_within_step_ = false;
  whole_steps_ = steps_;
}

// The shapes of full batches stay. Trials may end otherwise each time, so a run with a grain makes none.
void RankTrainer::search_algorithms_if(bool shapes_stay) {
  const bool sets = rank_.index_in_process() == 0;  // the setting is the process's
  if (sets && rank_.device().is_cuda() && !options_.batch.grain) search_algorithms(shapes_stay);
}

void RankTrainer::begin_epoch() {
  if (stops_ || stopping_.now()) throw Stopped("stopped by request");
  regroups_ = regrouping_ && regrouping_->now();
  if (regroups_) return;
  if (steps_ == 0) {
    totals_.reset();
    clock_.reset();
  }
  shown_.reset();
  all_parameters_.reset();
  net_.train();
  rank_.barrier();
  synchronize(rank_);
  traffic_.begin();
  if (wait_clock_) wait_clock_->reset();
  began_at_ = clock_.seconds();
  samples_before_ = totals_.samples;
  reported_ = Clock::now();
  go_on();
}

// The next step's time begins here.
void RankTrainer::go_on() {
  clock_.start();
  if (wait_clock_) wait_clock_->start();
  if (balance_) balance_->leave_out();
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

// With local SGD the ranks' parameters differ within a round, so nothing is kept there.
bool RankTrainer::within_round() const {
  const auto* const local = std::get_if<LocalSgdOptions>(&options_.way);
  return local != nullptr && steps_ % local->sync_every != 0;
}

// Call it between two steps. The epoch's seconds are those of training alone.
void RankTrainer::keep_or_stop(const Keep& keep) {
  stops_ = stops_ || stopping_.after_step();
  if (keep && within_round()) return;
  const int64_t every = options_.keep.checkpoints ? options_.keep.checkpoints->every : 0;
  const bool is_time = every > 0 && steps_ % every == 0;
  if (keep && (is_time || stops_)) {
    watch_.settle();
    if (!not_finite().empty()) return;
    synchronize(rank_);
    clock_.pause();
    if (wait_clock_) wait_clock_->pause();
    traffic_.leave_out(keep);
    all_parameters_.reset();
    go_on();
  }
  if (stops_) {
    rank_.barrier();  // waits until the rank that writes is done
    throw Stopped("stopped by request");
  }
}

void RankTrainer::end_epoch(EpochMetrics& metrics) {
  watch_.settle();
  if (totals_.left_out == samples_of_epoch()) {  // the next epoch would begin with the same weights, and end alike
    watch_.give_up("epoch " + std::to_string(metrics.epoch) +
                   ": every step was skipped, since its loss or gradients are not finite");
  }
  if (!not_finite().empty()) return;
  update_.synchronize();
  synchronize(rank_);
  own_time_ = {.seconds = kNotCounted, .samples = totals_.samples - samples_before_};
  own_wait_ = kNotCounted;
  if (wait_clock_) {
    own_wait_ = wait_clock_->seconds();
    own_time_.seconds = clock_.seconds() - began_at_ - own_wait_;
    wait_clock_->pause();
  }
  rank_.barrier();
  metrics.seconds = clock_.seconds();
  metrics.bytes_per_step = traffic_.per_step();
  all_parameters_.emplace(update_.part());  // evaluation and files need whole parameters
  if (options_.batch.balance != BalanceRule()) {
    metrics.parts = parts_of_full_batch(options_.batch, shares_, net_.mesh().data().world_size());
  }
  steps_ = 0;
}

// If a checkpoint follows, the evaluation is finished before the run stops. Otherwise the epoch's training would be
// lost.
void RankTrainer::evaluate_now(EpochMetrics& metrics, bool to_the_end) {
  metrics.test_accuracy = kNotCounted;
  if (test_.size() == 0) return;
  net_.eval();
  search_algorithms_if(false);
  const auto forward = [&](const Batch& batch) {
    if (!to_the_end && callbacks_.stop.stop_requested()) throw Stopped("stopped by request");
    return net_.forward(batch);
  };
  constexpr int64_t batch_size = 256;
  const auto means = measure(evaluation_forward(options_, rank_.device(), forward), test_, measures_of(task_),
                             net_.mesh().data(), batch_size, grain_of(options_.batch));
  put_measures(means, task_, metrics);
}

void RankTrainer::show() {
  if (!update_.average() || !update_.average()->is_begun() || shown_) return;
  all_parameters_.reset();
  shown_.emplace(*update_.average());
}

bool RankTrainer::holds_whole() {
  return net_.mesh().shape().size() == net_.mesh().shape().data;
}

std::shared_ptr<torch::nn::Module> RankTrainer::whole() {
  if (holds_whole()) return made_.module ? made_.module : update_.part()->module().shared_from_this();
  MadeModule made = task_.module(rank_, options_.seed);
  net_.gather(made.layers);
  return made.whole();
}

}  // namespace lockstep

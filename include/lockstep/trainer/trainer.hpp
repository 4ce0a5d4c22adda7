// The trainer: everything that `lockstep train` and `lockstep eval` do, without a terminal.
//
// train() runs one rank per device, reports through callbacks (called on rank 0's thread, one at a time) and keeps its
// run in a folder. Under a launcher (see rank.hpp) the process with rank 0 reports and writes; on_data is called, and
// the result is the same, in all of them. Thread-safe for different folders. The library prints nothing.
#pragma once

#include <lockstep/base/error.hpp>
#include <lockstep/devices/devices.hpp>
#include <lockstep/layout/model_split.hpp>
#include <lockstep/optim/learning_rate.hpp>
#include <lockstep/ranks/evaluate.hpp>
#include <lockstep/trainer/metrics.hpp>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <stop_token>
#include <string>
#include <vector>

namespace lockstep {

struct TrainOptions {
  std::string model = "lenet";  // one of model_names()
  double width = 1;             // of the model, as the next three: see ModelOptions in models.hpp
  int64_t image_size = 0;
  int64_t groups = 1;
  double dropout = 0.5;
  std::string data = "fashion-mnist";   // or "synthetic"
  std::filesystem::path data_dir = {};  // of the IDX files; empty: where packages put them
  Devices devices = {};                 // one rank per entry; empty: default_devices()
  int threads_per_rank = 1;             // intra-op threads of each rank
  int64_t batch_size = 256;             // of the global batch, times scale_batch
  int64_t scale_batch = 1;
  // In how many parts, one after the other, a rank computes its part of a batch. The gradients are the same (but
  // BatchNorm normalises over what is computed at once), and the activations of one of them are in memory at a time.
  int accumulate = 1;
  // Whose part of a batch is how large. "equal": near-equal parts. "2,1": the first device gets twice as many samples
  // as the second (shares.hpp; of the split's data axis, if there is one). "auto": in proportion to the devices' speed,
  // measured while they train (balance.hpp), so that two runs differ by what rounding leaves, also if one was resumed.
  std::string balance = "equal";
  std::string optimizer = "sgd";  // one of optimizer_names()
  double momentum = 0;            // as weight_decay: see OptimizerSettings in optimizers.hpp
  double weight_decay = 0;
  double clip = 0;              // the largest norm of a step's gradients, which are scaled down to it; 0: none
  double lr = 0.2;              // for batches of reference_batch samples; what becomes of it: learning_rate.hpp
  int64_t reference_batch = 0;  // 0: batch_size
  LrScaling scale_lr = LrScaling::none;
  double warmup = 0;  // epochs
  LrSchedule schedule = LrSchedule::constant;
  std::vector<int> step_epochs = {};  // as step_factor of LrSchedule::step
  double step_factor = 0.1;
  int epochs = 10;
  uint64_t seed = 1;  // of the weights, of the order of the samples (why 1: docs/results) and of dropout
  // What becomes of a run when a step's loss or gradients are not finite; all ranks do the same in the same step.
  // "stop": train() throws NotFinite, and what is kept is of before. "skip": the step leaves everything as it was, and
  // a warning names it; after an epoch of such steps alone train() throws NotFinite. "go-on": nothing looks. On a GPU
  // "skip" waits for it in each step; "stop" notices a step later.
  std::string on_nan = "stop";
  // Steps between two looks whether the devices that should hold the same weights do (check_replicas.hpp); -1: one at
  // the end of each epoch, 0: none. With sync_every those within a round are left out.
  int64_t check_replicas = -1;
  // "float32"; "tf32": the same with the products' factors rounded to TF32, on NVIDIA GPUs alone; or "bf16": forward
  // and loss as automatic mixed precision (autocast.hpp), weights and update in float32.
  std::string precision = "float32";
  // "contiguous": images channel by channel; "channels-last": pixel by pixel, which many convolutions are faster on,
  // and bfloat16 on GPUs wants. The results are the same but for rounding.
  std::string memory_format = "contiguous";
  // How the network is split over the ranks, as a plan has it (plan.hpp). Absent: not at all, all ranks along data.
  std::optional<ModelSplit> split = {};
  // BatchNorm over the samples of all ranks (sync_batch_norm.hpp), for a model that has some, split by data alone.
  bool sync_batchnorm = false;
  // 1: each rank keeps and computes its slice of the optimizer; 2: and of the gradients (sharded_optimizer.hpp). Of a
  // network split by data alone, and not of lars and lamb. 0: every rank has all of it.
  int zero_stage = 0;
  // How the ranks' gradients become one: "none": as they are; "bf16", "fp16": rounded (half_precision_hook.hpp);
  // "powersgd": as matrices of compress_rank (power_sgd.hpp; 0: its default), with the network split by data alone.
  std::string compress = "none";
  int64_t compress_rank = 0;
  // If not 0, gradients are not averaged at all: each rank takes so many steps of its own and then the parameters are,
  // with an outer optimizer (local_sgd.hpp); also at the end of each epoch. With the network split by data alone.
  int64_t sync_every = 0;
  double outer_lr = 1;
  double outer_momentum = 0;
  bool cuda_graph = false;             // GPUs only: full batches' steps are recorded once as a CUDA graph and replayed
  std::filesystem::path run_dir = {};  // where the run is kept; must not hold another run. Empty: nothing is written
  std::filesystem::path trace = {};    // if not empty: gets a timeline of some of the first steps, as Chrome's JSON; of
                                       // a launcher's process N, of its ranks alone, with .N before the extension
  int keep_last = 2;                   // checkpoints to resume from in run_dir, beside the best epoch's; 0: none at all
  int64_t checkpoint_every = 0;        // steps between two of them within an epoch; 0: only at the end of each epoch
  std::filesystem::path resume = {};   // if not empty: a checkpoint, or a run's folder, whose newest whole one is meant
                                       // (on_warning is told of a damaged one), to go on from with the results of a
                                       // run that never stopped; run_dir may be that run's
  bool tensorboard = false;            // run_dir also gets an event file for TensorBoard
  std::chrono::seconds timeout{300};   // of every wait of a rank for another, from 1 to 1,000,000
};

// All of the options but resume, trace and timeout as JSON text, enough to run again; and back. to_json throws Error
// for a path that is not UTF-8. from_json throws Error that names the key: one that is not known, or a value of another
// type or out of its range, which is never rounded or cut; absent keys keep their defaults. The text's devices are
// parsed for this machine, so they must be there, unless `devices` names others in their place.
std::string to_json(const TrainOptions& options);
TrainOptions train_options_from_json(const std::string& text, const Devices& devices = {});

struct StepProgress {
  int epoch = 0;     // from 1
  int64_t done = 0;  // samples of this epoch trained so far, over all ranks
  int64_t total = 0;
  double seconds = 0;  // since the epoch began
  double loss = 0;     // the mean over rank 0's samples of the epoch so far
};

struct TrainCallbacks {
  std::function<void(const std::string& source)> on_data = {};  // once, when the data are loaded and run_dir is taken
  std::function<void(const StepProgress&)> on_step = {};  // at most some ten times a second, and at the end of an epoch
  std::function<void(const EpochMetrics&)> on_epoch = {};  // after each epoch's evaluation, its files written
  std::function<void(const std::string& message)> on_warning =
      {};  // what did not work but does not end the run: a curve that could not be drawn
  // A request, of any rank's process, ends the run on all ranks after the same step, within a second or some steps; a
  // checkpoint of that step is kept, if any are (with sync_every only those of epochs). What was kept before stays.
  std::stop_token stop = {};
};

struct TrainResult {
  std::vector<EpochMetrics> history;  // one entry per finished epoch, also of before a resume
  Devices devices;
  bool stopped = false;              // the stop token ended it
  double seconds_per_epoch() const;  // mean over the finished epochs; 0 if there are none
  double data_wait() const;          // EpochMetrics::data_wait of all finished epochs together; 0 if there are none
};

// A run_dir that holds another run, or a file that a run would overwrite. Of two runs that want one folder at the same
// time, one gets it and the other this error.
class RunExists : public Error {
 public:
  using Error::Error;
};

// What ends a run with TrainOptions::on_nan "stop"; the text names the step and the rank. With "skip" it ends one that
// skipped every step of an epoch.
class NotFinite : public Error {
 public:
  using Error::Error;
};

// Trains, and after every epoch evaluates and writes into run_dir: config.json (first), metrics.jsonl,
// model.safetensors, curve.svg, and in checkpoints/ what it can be resumed from; curve.png at the end. On synthetic
// data metrics.jsonl and model.safetensors say so. BatchNorm's running statistics follow each device's own parts of the
// batches (without sync_batchnorm); before an epoch is evaluated and kept all devices take their mean, weighted by the
// samples that each has seen in it.
//
// Throws Error before the first step, for
// - the network and the data: a model that check_model refuses, an unknown data set, unreadable data, a data_dir beside
//   synthetic data, sync_batchnorm for a model without BatchNorm;
// - the batch: a global batch of less than 1 or more than all training samples; accumulate < 1, above the global batch,
//   or with a pipeline (which has microbatches);
// - the update: what check_optimizer and check_learning_rate refuse; an on_nan that it does not know; lars or lamb with
//   a split by channels (their norms are of whole layers);
// - the devices: threads_per_rank < 1 or > 1024, a precision or memory format that it does not know, a timeout out of
//   its range, a device that is not there, a split that check_split refuses or whose mesh is not as large as the run;
// - cuda_graph on CPU devices, with a split other than by data, with dropout, or with anything but plain SGD at a
//   constant rate without accumulation;
// - sync_batchnorm with such a split, cuda_graph or accumulation;
// - zero_stage with lars, lamb, cuda_graph, compress, sync_every or such a split;
// - compress: one that is not known, with cuda_graph, or "powersgd" with such a split; compress_rank without powersgd;
// - sync_every: what LocalSgd refuses; with such a split, compress, cuda_graph, sync_batchnorm or checkpoint_every
//   (within a round the ranks' parameters differ); outer_lr or outer_momentum without it;
// - on_nan "skip" with cuda_graph, sync_every or powersgd;
// - balance: shares that are not one per device; where NCCL exchanges, with cuda_graph, shares by which the first
// device
//   gets no samples. "auto" with sync_batchnorm, zero_stage 2 or such a split: in all three devices wait for each other
//   while their speed is measured. "auto" with sync_every (devices do not wait) or cuda_graph (steps have one size);
// - run_dir: one that cannot be written, or in which another process trains; RunExists;
// - resume: a checkpoint that is damaged or foreign (the text names the newest whole one before it), or of a run whose
//   steps were others: other data (known by their SHA-256), another model, batch size, … Only devices,
//   threads_per_rank, split, zero_stage, balance, memory_format, cuda_graph, on_nan, check_replicas, epochs, where
//   files lie and what is kept may differ.
//
// Throws Error after it: NotFinite; weights that differ between devices (see TrainOptions::check_replicas); a rank that
// fails (memory, a GPU); a file that cannot be written (a full disk); an exception from a callback. The Error names the
// rank or the file, and finished epochs stay readable. A run that ends before its first epoch is kept leaves nothing
// behind: neither its files nor the folders that it made.
//
// A resumed run gives the bits of one that never stopped if ranks and options are the same (but for balance "auto",
// which follows the clock, and on GPUs, where cuDNN takes the convolution that was fastest), and on other ranks what
// rounding leaves (with sync_every and an optimizer that has a state, which is each rank's own, it needs as many ranks
// as before). Dropout follows the seed, the step and the samples. Nothing in a step draws from LibTorch's generators;
// their state is kept for the ranks' devices all the same. Under a launcher each process reads the checkpoint.
TrainResult train(const TrainOptions& options, const TrainCallbacks& callbacks = {});

struct EvalOptions {
  Devices devices = {};  // empty: default_devices()
  int threads_per_rank = 1;
  int64_t batch_size = 256;             // over all devices at once; does not change the result
  std::filesystem::path data_dir = {};  // of the IDX files, for a run that had some; empty: as the run had it
};

struct EvalResult : Score {
  std::string source;  // of the data
  Devices devices;
};

// Test accuracy of a kept run on several devices at once, which need not be those that it was trained on: every sample
// counted once, whatever the split (the section's exercise). Throws Error: a folder without a readable config.json or
// model.safetensors, weights of another model, unreadable data, a data_dir for a run on synthetic data, options that
// train() would refuse.
EvalResult evaluate_run(const std::filesystem::path& run_dir, const EvalOptions& options = {});

}  // namespace lockstep

// The trainer: everything that `lockstep train` and `lockstep eval` do, without a terminal; fit.hpp has it for a
// network of your own.
//
// train() runs one rank per device, and keeps its run in a folder. It reports through callbacks, which are called one
// at a time: on rank 0's thread, but warnings on any rank's. Under a launcher (see rank.hpp) the process with rank 0
// reports and writes. on_data is called in all processes, and all get the same result. Thread-safe for different
// folders. The library prints nothing.
#pragma once

#include <lockstep/base/error.hpp>
#include <lockstep/devices/devices.hpp>
#include <lockstep/ranks/evaluate.hpp>
#include <lockstep/trainer/metrics.hpp>
#include <lockstep/trainer/train_options.hpp>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <stop_token>
#include <string>
#include <vector>

namespace lockstep {

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
  // What looks like a mistake or did not work, but does not end the run: a parameter that no rank used, a curve that
  // could not be drawn. On any rank's thread. Empty: LibTorch's warning handler gets it, which writes to stderr.
  std::function<void(const std::string& message)> on_warning = {};
  // A request, of any rank's process, ends the run on all ranks after the same step, within a second or some steps; a
  // checkpoint of that step is kept, if any are. With sync_every the round of steps ends first.
  std::stop_token stop = {};
};

struct TrainResult {
  std::vector<EpochMetrics> history;  // one entry per finished epoch, also of before a resume
  Devices devices;
  bool stopped = false;  // the stop token ended it
  // A rank that took three times as long per sample as others with the same layers, and made them wait for a second per
  // epoch or more: its name and the times, in words. Or a stage of a pipeline that took three times as long as the
  // mean of the others, and a second more: then all stages' times. Waits for other ranks do not count. Empty if there
  // is none, with cuda_graph, and on GPUs with balance "auto" or whose events tell no times.
  std::string straggler = {};
  double seconds_per_epoch() const;  // mean over the finished epochs; 0 if there are none
  double data_wait() const;          // EpochMetrics::data_wait of all finished epochs together; 0 if there are none
};

// Trains one of lockstep's models on one of its data sets, or gpt on a text, and after every epoch evaluates and writes
// into run_dir: config.json (first), metrics.jsonl, model.safetensors, curve.svg, and in checkpoints/ what it can be
// resumed from; curve.png at the end. The empty file .lock keeps a second writer out. On synthetic data metrics.jsonl
// and model.safetensors say so. BatchNorm's running statistics follow each device's own parts of the batches (without
// sync_batchnorm); before an epoch is evaluated and kept all devices take their mean, weighted by the samples that each
// has seen in it.
//
// Throws Error before the first step. Options have their keys here, as in the errors. "By data alone" is a split
// without pipeline and tensor axes, in one batch at a time. Refused are
// - of the network and the data: a model that check_model refuses, unreadable data, a data_dir beside synthetic data,
//   sync_batchnorm for a model without BatchNorm; gpt without a text, a text of which a tenth is no longer than the
//   context, and a text for another model;
// - of the batch: a global batch of less than 1, or of more than all training samples; accumulate below 1 or above
//   the global batch, or beside a pipeline, which has microbatches;
// - grain: below 0 or above the global batch; with more than one thread per rank, sync_batchnorm, compress, sync_every,
//   cuda_graph, a split by channels, or a split's microbatches, which grains are already;
// - check_arithmetic: not from 0 to 1; without a grain, or without a split by data alone;
// - of the update: what check_optimizer and check_learning_rate refuse; lars or lamb with a split by channels, since
//   their norms are of whole layers;
// - of the devices: a device that is not there, tf32 on CPUs, threads_per_rank, a timeout or a silence out of its
//   range, a split that check_split refuses or whose mesh is not as large as the run;
// - cuda_graph on CPUs, without a split by data alone, with dropout, or with accumulate;
// - sync_batchnorm without a split by data alone, or with cuda_graph or accumulate;
// - zero_stage with lars, lamb, cuda_graph, compress or sync_every, or without a split by data alone; 2 or 3
//   with sync_batchnorm; 3 with check_arithmetic;
// - compress with cuda_graph; powersgd without a split by data alone; compress_rank without powersgd;
// - sync_every: what LocalSgd refuses; with compress, cuda_graph, sync_batchnorm or checkpoint_every, or without a
//   split by data alone, since ranks' parameters differ within a round; outer_lr or outer_momentum without it;
// - in an elastic job (`lockstep launch --elastic`): no grain, zero_stage, a split, balance, trace, and a second
//   call in the same process;
// - on_nan "skip" with cuda_graph, sync_every or powersgd;
// - balance: shares that are not one per device; with cuda_graph where NCCL exchanges, shares that give the first
//   device no samples; "auto" where devices wait for each other while their speed is measured (sync_batchnorm,
//   zero_stage 2 or 3, no split by data alone), where they do not wait at all (sync_every), or where steps have one
//   size (cuda_graph);
// - of what is kept: a run_dir that cannot be written, or in which another process trains or another run lies (then
//   options() is run_dir alone);
//   checkpoint_every with keep_last 0;
// - resume: a checkpoint that is damaged or foreign (the text names the newest whole one before it), or of a run
//   whose steps were others: other data (known by their SHA-256), another model, batch size, … These alone may
//   differ: devices, threads_per_rank, split, zero_stage, balance, memory_format, cuda_graph, on_nan,
//   check_replicas, check_arithmetic, epochs, where files lie, and what is kept. With a grain memory_format may not
//   differ. A checkpoint that lies in the folder of a run whose steps were others is refused too.
//
// Throws Error after it: a loss or gradient that is not finite (Error::not_finite; the text names step and rank);
// weights or optimizer states that differ between devices (see TrainOptions::check_replicas); a device that computes
// wrongly (see TrainOptions::check_arithmetic); a rank that fails (memory, a GPU); a file that cannot be written (a
// full disk); an exception from a callback. The Error names the rank or the file, and finished epochs stay readable. A
// run that ends before its first epoch is kept leaves nothing behind: neither its files nor the folders that it made.
//
// A resumed run gives the bits of one that never stopped if ranks and options are the same (but for balance "auto",
// which follows the clock, and on GPUs, where cuDNN takes the convolution that was fastest), and on other ranks what
// rounding leaves (with sync_every and an optimizer that has a state, which is each rank's own, it needs as many ranks
// as before). With a grain the bits are the same on other ranks too. Dropout follows the seed, the step and the
// samples. Nothing in a step draws from LibTorch's generators; their state is kept for the ranks' devices all the same.
// Under a launcher each process reads the checkpoint.
//
// In an elastic job the others go on when a process is killed, and one that comes later joins them, all to the bits of
// a run in peace. If check_replicas finds a device whose weights or optimizer state are wrong, it gets the others'
// state; with check_replicas 1 the bits stay those of a run in peace, else the others have used its gradients. Any of
// the processes may have to report and write, so all need the callbacks and one run_dir. A process that comes when the
// run is done gets an empty history.
TrainResult train(const TrainOptions& options, const TrainCallbacks& callbacks = {});

struct EvalOptions {
  Devices devices = {};  // empty: default_devices()
  int threads_per_rank = 1;
  int64_t batch_size = 256;             // over all devices at once; does not change the result
  std::filesystem::path data_dir = {};  // folder of the IDX files, for a run that had some; empty: as the run had it
  std::filesystem::path text = {};      // the text of a run of gpt; empty: where the run had it
};

struct EvalResult : Score {
  bool counts_answers = true;  // false: `correct` is not counted, as of a text
  double perplexity = 0;       // of a text: exp(loss)
  std::string source;          // of the data
  std::string weights;         // weights_hash of the network
  Devices devices;
};

// Computes the test accuracy of a kept run, or of gpt the perplexity of the held-out text, on several devices at once,
// not necessarily those that it was trained on. Every sample counts once, whatever the split (the section's exercise).
// If the run had a grain, the loss has the same bits on any of them. Throws Error for a folder without a readable
// config.json or model.safetensors, weights of another model, unreadable data, a data_dir for a run on synthetic data,
// a text for a run on images, and options that train() would refuse.
EvalResult evaluate_run(const std::filesystem::path& run_dir, const EvalOptions& options = {});

}  // namespace lockstep

// The trainer does all that `lockstep train` and `lockstep eval` do, without a terminal; fit.hpp does so for a network
// of your own.
//
// train() runs one rank per device, and keeps its run in a folder. It calls the callbacks one at a time: on_data on the
// caller's thread, on_step and on_epoch on rank 0's, on_warning on the caller's or any rank's. Under a launcher (see
// rank.hpp) the process with rank 0 reports and writes. on_data is called in all processes. All get the same result.
// train() is thread-safe for different folders. The library prints nothing.
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
  int epoch = 0;     // the epoch's number, from 1
  int64_t done = 0;  // samples of this epoch trained so far, over all ranks
  int64_t total = 0;
  double seconds = 0;  // seconds since the epoch began
  double loss = 0;     // the mean over rank 0's samples of the epoch so far
};

struct TrainCallbacks {
  std::function<void(const std::string& source)> on_data = {};  // called one time: data are loaded, run_dir is taken
  std::function<void(const StepProgress&)> on_step = {};   // called some 10 times a second at most, and at epochs' ends
  std::function<void(const EpochMetrics&)> on_epoch = {};  // called after an epoch's evaluation, its files written
  // Gets a message about what looks like a mistake or did not work, but does not end the run: a parameter that no rank
  // used, a report that could not be written. The caller's thread or any rank's calls it. Empty: LibTorch's warning
  // handler gets it, which writes to stderr.
  std::function<void(const std::string& message)> on_warning = {};
  // A request in any rank's process ends the run on all ranks after the same step, within a second or some steps. If
  // checkpoints are kept, that step gets one. With local SGD the round of steps ends first.
  std::stop_token stop = {};
};

struct TrainResult {
  std::vector<EpochMetrics> history;  // one entry per finished epoch, also for epochs before a resume
  Devices devices;
  bool stopped = false;  // the stop token ended the run
  // Straggler and its times, in words. A straggler is a rank that took three times as long per sample as others with
  // the same layers, and made them wait for a second per epoch or more. Or it is a stage of a pipeline that took three
  // times as long as the mean of the others, and a second more: then all stages' times follow. Waits for other ranks do
  // not count. Empty if there is none, with a CUDA graph, and on GPUs with balance "auto" or whose events tell no
  // times.
  std::string straggler = {};
  double seconds_per_epoch() const;  // gives the mean over the finished epochs; 0 if there are none
  double data_wait() const;          // gives EpochMetrics::data_wait of all finished epochs; 0 if there are none
};

// Trains one of lockstep's models on one of its data sets, or gpt on a text. After every epoch it evaluates and writes
// into run_dir: config.json (first), metrics.jsonl, model.safetensors, and checkpoints/ to resume a run from. A run
// gets report.html (report.hpp), and notes.json with what that shows, every some seconds and at the end. The file .lock
// keeps a second writer out. BatchNorm's running statistics follow each device's own parts of the batches; before an
// evaluation all devices take their weighted mean.
//
// Throws Error before the first step, with the options' keys: for options that do not go together (docs/guide.md has
// the table), values out of their range, data or devices that are not there, a run_dir that cannot be written or in
// which another process trains or another run lies (then options() is run_dir alone), and a checkpoint to resume from
// that is damaged or of another run. A resumed run keeps its settings; these alone may differ: devices,
// threads_per_rank, balance, on_nan, check_replicas, check_arithmetic, epochs, memory_format without a grain,
// cuda_graph, where files lie, what is kept, and of the way the split and the stage of ZeRO.
//
// Throws Error after the first step, with the rank or the file named: a loss or a gradient that is not finite
// (Error::not_finite); replicas that differ (check_replicas); a device that computes wrongly (check_arithmetic); a rank
// that fails; a file that cannot be written; an exception from a callback. Finished epochs stay readable. A run that
// ends before its first epoch is kept leaves nothing behind.
//
// A resumed run gives the bits of one that never stopped if ranks and options are the same, but for balance "auto" and
// for GPUs, where cuDNN takes the convolution that was fastest. On other ranks the results differ by rounding, but with
// a grain they have the same bits. With local SGD and an optimizer that has a state, keep the number of ranks.
//
// In an elastic job (`lockstep launch --elastic`) the others go on when a process is killed, and a later process joins
// them. The bits are those of a run in peace. A device whose weights check_replicas finds wrong gets the others' state.
// Give all processes the callbacks and one run_dir, since any of them may have to report and write.
TrainResult train(const TrainOptions& options, const TrainCallbacks& callbacks = {});

struct EvalOptions {
  Devices devices = {};  // empty: default_devices()
  int threads_per_rank = 1;
  int64_t batch_size = 256;             // size of a batch over all devices; it does not change the result
  std::optional<DataSource> data = {};  // data of the run's kind, from another place; none: where the run had them
};

struct EvalResult : Score {
  bool counts_answers = true;  // false: `correct` is not counted, as of a text
  double perplexity = 0;       // perplexity of a text: exp(loss)
  std::string source;          // source of the data
  std::string weights;         // weights_hash of the network
  Devices devices;
};

// Computes the test accuracy of a kept run, or of gpt the perplexity of the held-out text, on several devices at once,
// not necessarily those that it was trained on. Every sample counts once, whatever the split (the section's exercise).
// If the run had a grain, the loss has the same bits on any devices. Throws Error for a folder without a readable
// config.json or model.safetensors, weights of another model, unreadable data, data of another kind than the run's, and
// options that train() would refuse.
EvalResult evaluate_run(const std::filesystem::path& run_dir, const EvalOptions& options = {});

}  // namespace lockstep

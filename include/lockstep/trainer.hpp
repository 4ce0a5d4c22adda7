// The trainer: everything that `lockstep train` and `lockstep eval` do, without a terminal.
//
// train() runs one rank per device, reports through callbacks (called on rank 0's thread, one at a time) and keeps its
// run in a folder. Thread-safe for different folders. The library prints nothing.
#pragma once

#include <lockstep/devices.hpp>
#include <lockstep/evaluate.hpp>
#include <lockstep/metrics.hpp>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <stop_token>
#include <string>
#include <vector>

namespace lockstep {

struct TrainOptions {
  std::string model = "lenet";          // the only one so far
  std::string data = "fashion-mnist";   // or "synthetic"
  std::filesystem::path data_dir = {};  // of the IDX files; empty: where packages put them
  Devices devices = {};                 // one rank per entry; empty: default_devices()
  int threads_per_rank = 1;             // intra-op threads of each rank
  int64_t batch_size = 256;             // of the global batch
  double lr = 0.2;                      // of plain SGD
  int epochs = 10;
  uint64_t seed = 0;                   // of the weights and of the order of the samples
  std::filesystem::path run_dir = {};  // where the run is kept; must not hold another run. Empty: nothing is written
  std::filesystem::path trace = {};    // if not empty: gets a timeline of some of the first steps, as Chrome's JSON
};

// All of the options but the trace as JSON text, enough to run again; and back. from_json throws Error that names the key; absent
// keys keep their defaults.
std::string to_json(const TrainOptions& options);
TrainOptions train_options_from_json(const std::string& text);

struct StepProgress {
  int epoch = 0;     // from 1
  int64_t done = 0;  // samples of this epoch trained so far, over all ranks
  int64_t total = 0;
  double seconds = 0;  // since the epoch began
  double loss = 0;     // rank 0's mean over the epoch so far
};

struct TrainCallbacks {
  std::function<void(const std::string& source)> on_data = {};  // once, when the data are loaded
  std::function<void(const StepProgress&)> on_step = {};  // at most some ten times a second, and at the end of an epoch
  std::function<void(const EpochMetrics&)> on_epoch = {};  // after each epoch's evaluation, its files written
  std::function<void(const std::string& message)> on_warning =
      {};                     // what did not work but does not end the run: a curve that could not be drawn
  std::stop_token stop = {};  // a request ends the run at the next step; finished epochs stay on disk
};

struct TrainResult {
  std::vector<EpochMetrics> history;  // one entry per finished epoch
  Devices devices;
  bool stopped = false;              // the stop token ended it
  double seconds_per_epoch() const;  // mean over the finished epochs; 0 if there are none
};

// Trains, and after every epoch evaluates and writes into run_dir: config.json (first), metrics.jsonl,
// model.safetensors, curve.svg; curve.png at the end. Throws Error before the first step, with nothing written: an
// unknown model or data set, unreadable data, batch_size or epochs < 1, lr negative or not finite, threads_per_rank <
// 1, a device that is not there, a run_dir that cannot be written or already holds a run.
TrainResult train(const TrainOptions& options, const TrainCallbacks& callbacks = {});

struct EvalOptions {
  Devices devices = {};  // empty: default_devices()
  int threads_per_rank = 1;
  int64_t batch_size = 256;             // over all devices at once; does not change the result
  std::filesystem::path data_dir = {};  // empty: as the run had it
};

struct EvalResult : Score {
  std::string source;  // of the data
  Devices devices;
};

// Test accuracy of a kept run on several devices at once: every sample counted once, whatever the split (the section's
// exercise). Throws Error: a folder without config.json or model.safetensors, weights of another model, unreadable
// data.
EvalResult evaluate_run(const std::filesystem::path& run_dir, const EvalOptions& options = {});

}  // namespace lockstep

// TrainOptions: every option of a run, with the defaults of `lockstep train`.
//
// A plain value of nested groups. config.json, the program's flags and errors have one list of keys, without groups:
// `batch_size` is batch.size, `keep_last` keep.last (src/trainer/option_table.hpp). Only the way keeps its own in
// config.json: {"way": {"zero_stage": 2}}. Thread-safe.
#pragma once

#include <lockstep/devices/devices.hpp>
#include <lockstep/lab/optimizers.hpp>
#include <lockstep/models/models.hpp>
#include <lockstep/optim/learning_rate.hpp>
#include <lockstep/trainer/batch_settings.hpp>
#include <lockstep/trainer/data_options.hpp>
#include <lockstep/trainer/rate_options.hpp>
#include <lockstep/trainer/way.hpp>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

namespace lockstep {

enum class Precision {
  float32,
  tf32,  // float32 whose products round their factors to TF32; on NVIDIA GPUs alone
  bf16,  // forward and loss in automatic mixed precision (autocast.hpp), weights and update in float32
};

// How images lie in memory. The results are the same but for rounding.
enum class MemoryFormat {
  automatic,      // fast_memory_format(), in models.hpp; a run keeps what it was
  contiguous,     // images channel by channel
  channels_last,  // pixel by pixel: faster for many convolutions, and for bfloat16 on GPUs
};

// Says what a run does when a step's loss or gradients are not finite. All ranks do the same in the same step.
enum class OnNan {
  stop,   // train() throws Error::not_finite; what was kept before stays. On a CPU the step is not taken. On a GPU this
          // is noticed one step later, so that nothing waits: the step was taken, and nothing is kept of it
  skip,   // the step changes nothing, and a warning names it. If an epoch has only such steps, train() throws
          // Error::not_finite. On a GPU each step waits for the check
  go_on,  // nothing is checked
};

// "float32", "channels-last", "go-on", … And back; these throw Error that names what there is.
std::string_view to_string(Precision precision);
std::string_view to_string(MemoryFormat format);
std::string_view to_string(OnNan on_nan);
Precision precision_from(std::string_view name);
MemoryFormat memory_format_from(std::string_view name);
OnNan on_nan_from(std::string_view name);

// Options of the update. RateOptions has the learning rate.
struct OptimizerOptions {
  OptimizerKind kind = OptimizerKind::sgd;
  double momentum = 0;  // for this and weight_decay see OptimizerSettings in optimizers.hpp
  double weight_decay = 0;
  double clip = 0;  // the largest norm of a step's gradients, which are scaled down to it; 0: none
};

// Options of the files that a run keeps, and of the checkpoint that it goes on from.
struct KeepOptions {
  std::filesystem::path run_dir = {};  // where the run is kept; must not hold another run. Empty: nothing is written
  int last = 2;                        // checkpoints to resume from in run_dir, beside the best epoch's; 0: none at all
  int64_t every = 0;         // steps between two checkpoints within an epoch; 0: only at the end of each epoch
  bool tensorboard = false;  // run_dir also gets an event file for TensorBoard
  // If not empty: gets a timeline of some of the first steps, as Chrome's JSON; of a launcher's process N, of its ranks
  // alone, with .N before the extension.
  std::filesystem::path trace = {};
  // If not empty: a checkpoint, or a run's folder, whose newest whole one is meant (on_warning is told of a damaged
  // one), to go on from with the results of a run that never stopped; run_dir may be that run's. "auto": the run in
  // run_dir if it has a checkpoint; or else a new one, also in the place of one that was killed before its first.
  std::filesystem::path resume = {};
};

struct TrainOptions {
  ModelOptions model = {};
  DataOptions data = {};
  Devices devices = {};               // one rank per entry; empty: default_devices()
  int threads_per_rank = 1;           // intra-op threads of each rank
  Way way = Averaged();               // how the ranks share the work
  std::chrono::seconds timeout{300};  // limit of a rank's wait for another, from 1 to 1,000,000
  std::chrono::seconds silence{0};    // see RunOptions::silence; from 0 to 1,000,000
  BatchSettings batch = {};
  OptimizerOptions optimizer = {};
  RateOptions rate = {};
  int epochs = 10;
  uint64_t seed = 1;  // for the first weights, the order of the samples (docs/results says why 1), and dropout
  OnNan on_nan = OnNan::stop;
  // Steps between two checks that the devices hold the same weights and optimizer states (check_replicas.hpp), with
  // batch.grain the same running statistics too, before a step's update; one more is at the end of each epoch. With
  // local SGD they come at the end of a round. What one device alone has (slices of ZeRO, parts of a split, local SGD's
  // optimizers, all of a single device) must not change between two updates: so 1 covers every step. -1: at the end of
  // each epoch alone, when two copies are compared and nothing else. 0: none.
  int64_t check_replicas = -1;
  // From 0 to 1: the fraction of the grains that another device computes again, and compares to the bit
  // (lockstep/lab/check_arithmetic.hpp). Needs batch.grain and the whole network on each rank. 0: none.
  double check_arithmetic = 0;
  Precision precision = Precision::float32;
  MemoryFormat memory_format = MemoryFormat::automatic;
  // BatchNorm normalises over the samples of all ranks (sync_batch_norm.hpp). The model must have some.
  bool sync_batchnorm = false;
  KeepOptions keep = {};
};

// All of the options but resume, trace, timeout and silence as JSON text, enough to run again; and back. to_json throws
// Error for a path that is not UTF-8. from_json throws Error that names the key: one that is not known, or a value of
// another type or out of its range, which is never rounded or cut; absent keys keep their defaults. It reads texts of
// lockstep 0.1 too. The text's devices are parsed for this machine, so they must be there, unless `devices` names
// others in their place.
std::string to_json(const TrainOptions& options);
TrainOptions train_options_from_json(const std::string& text, const Devices& devices = {});

}  // namespace lockstep

// TrainOptions: all that a run can be told, with the defaults of `lockstep train`.
//
// A plain value. Its enums have the names that config.json and the program's flags have. Thread-safe.
#pragma once

#include <lockstep/devices/devices.hpp>
#include <lockstep/layout/model_split.hpp>
#include <lockstep/optim/learning_rate.hpp>
#include <lockstep/optim/optimizers.hpp>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace lockstep {

enum class DataSource { fashion_mnist, synthetic };

enum class Precision {
  float32,
  tf32,  // float32 whose products round their factors to TF32; on NVIDIA GPUs alone
  bf16,  // forward and loss as automatic mixed precision (autocast.hpp), weights and update in float32
};

// The results are the same but for rounding.
enum class MemoryFormat {
  contiguous,     // images channel by channel
  channels_last,  // pixel by pixel, which many convolutions are faster on, and bfloat16 on GPUs wants
};

// How the ranks' gradients become one.
enum class Compression {
  none,      // as they are
  bf16,      // rounded, as fp16 (half_precision_hook.hpp)
  fp16,      //
  powersgd,  // as matrices of TrainOptions::compress_rank (power_sgd.hpp), with the network split by data alone
};

// What becomes of a run when a step's loss or gradients are not finite; all ranks do the same in the same step.
enum class OnNan {
  stop,   // train() throws NotFinite, and what is kept is of before; a GPU's step is noticed a step later
  skip,   // the step leaves everything as it was, and a warning names it; after an epoch of such steps alone train()
          // throws NotFinite. On a GPU each step waits for it
  go_on,  // nothing looks
};

// "fashion-mnist", "channels-last", "powersgd", "go-on", … And back; these throw Error that names what there is.
std::string_view to_string(DataSource data);
std::string_view to_string(Precision precision);
std::string_view to_string(MemoryFormat format);
std::string_view to_string(Compression compression);
std::string_view to_string(OnNan on_nan);
DataSource data_source_from(std::string_view name);
Precision precision_from(std::string_view name);
MemoryFormat memory_format_from(std::string_view name);
Compression compression_from(std::string_view name);
OnNan on_nan_from(std::string_view name);

// Whose part of a batch is how large.
struct EqualParts {  // near-equal ones
  bool operator==(const EqualParts&) const = default;
};
// In proportion to the devices' speed, measured while they train (balance.hpp). Two runs then differ by what rounding
// leaves, also if one was resumed.
struct PartsBySpeed {
  bool operator==(const PartsBySpeed&) const = default;
};
// {2, 1}: the first device gets twice as many samples as the second (shares.hpp; of the split's data axis, if there is
// one).
using BalanceRule = std::variant<EqualParts, PartsBySpeed, std::vector<double>>;

// "equal", "auto", "2,1". And back; throws Error that says what there is.
std::string to_string(const BalanceRule& sizes);
BalanceRule balance_rule_from(const std::string& text);

struct TrainOptions {
  std::string model = "lenet";  // one of model_names()
  double width = 1;             // of the model, as the next three: see ModelOptions in models.hpp
  int64_t image_size = 0;
  int64_t groups = 1;
  double dropout = 0.5;
  DataSource data = DataSource::fashion_mnist;
  std::filesystem::path data_dir = {};  // of the IDX files; empty: where packages put them
  Devices devices = {};                 // one rank per entry; empty: default_devices()
  int threads_per_rank = 1;             // intra-op threads of each rank
  int64_t batch_size = 256;             // of the global batch, times scale_batch
  int64_t scale_batch = 1;
  // In how many parts, one after the other, a rank computes its part of a batch. The gradients are the same (but
  // BatchNorm normalises over what is computed at once), and the activations of one of them are in memory at a time.
  int accumulate = 1;
  BalanceRule balance = EqualParts();
  OptimizerKind optimizer = OptimizerKind::sgd;
  double momentum = 0;  // as weight_decay: see OptimizerSettings in optimizers.hpp
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
  OnNan on_nan = OnNan::stop;
  // Steps between two looks whether the devices that should hold the same weights do (check_replicas.hpp); -1: one at
  // the end of each epoch, 0: none. With sync_every those within a round are left out.
  int64_t check_replicas = -1;
  Precision precision = Precision::float32;
  MemoryFormat memory_format = MemoryFormat::contiguous;
  // How the network is split over the ranks, as a plan has it (plan.hpp). Absent: not at all, all ranks along data.
  std::optional<ModelSplit> split = {};
  // BatchNorm over the samples of all ranks (sync_batch_norm.hpp), for a model that has some, split by data alone.
  bool sync_batchnorm = false;
  // 1: each rank keeps and computes its slice of the optimizer; 2: and of the gradients (sharded_optimizer.hpp). Of a
  // network split by data alone, and not of lars and lamb. 0: every rank has all of it.
  int zero_stage = 0;
  Compression compress = Compression::none;
  int64_t compress_rank = 0;  // of Compression::powersgd; 0: its default
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
  std::chrono::seconds silence{6};     // as RunOptions::silence, from 1 to 1,000,000
};

// All of the options but resume, trace, timeout and silence as JSON text, enough to run again; and back. to_json throws
// Error for a path that is not UTF-8. from_json throws Error that names the key: one that is not known, or a value of
// another type or out of its range, which is never rounded or cut; absent keys keep their defaults. The text's devices
// are parsed for this machine, so they must be there, unless `devices` names others in their place.
std::string to_json(const TrainOptions& options);
TrainOptions train_options_from_json(const std::string& text, const Devices& devices = {});

}  // namespace lockstep

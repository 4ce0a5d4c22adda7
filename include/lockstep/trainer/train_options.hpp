// TrainOptions: every option of a run, with the defaults of `lockstep train`.
//
// It is a plain value of nested groups, and thread-safe. Options that exclude each other are one field, a variant or an
// optional group, where they answer one question. config.json, the program's flags and errors have one list of keys,
// without groups: `batch_size` is batch.size, `text` a TextFile's file (src/trainer/option_table.hpp). Only the way has
// a group in config.json: {"way": {"zero_stage": 2}}.
#pragma once

#include <lockstep/data/data.hpp>
#include <lockstep/devices/devices.hpp>
#include <lockstep/lab/optimizers.hpp>
#include <lockstep/models/models.hpp>
#include <lockstep/optim/learning_rate.hpp>
#include <lockstep/trainer/way.hpp>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <variant>
#include <vector>

namespace lockstep {

// A DataSource says what one of lockstep's models learns. These are its three kinds.
struct FashionMnist {
  std::filesystem::path folder = {};  // the folder of the IDX files; empty: where packages put them
  bool operator==(const FashionMnist&) const = default;
};
struct SyntheticImages {  // synthetic_images()
  bool operator==(const SyntheticImages&) const = default;
};
struct TextFile {  // for a model that learns text (models.hpp)
  std::filesystem::path file = {};
  bool operator==(const TextFile&) const = default;
};
using DataSource = std::variant<FashionMnist, SyntheticImages, TextFile>;

// Makes a stand-in of the same shapes and types, which a network can learn. Its images are ten random patterns, moved,
// faded, and mixed with each other and with noise. `source` says "synthetic". The same seed gives the same bits on
// every machine. Throws Error for a size below 1.
ImageData synthetic_images(int64_t train_size = 60000, int64_t test_size = 10000, uint64_t seed = 0);

// Loads the images. Throws Error as load_fashion_mnist does, and for a text.
ImageData load_data(const DataSource& data);

// A BalanceRule says how the parts of a batch are sized. These are its three kinds.
struct EqualParts {  // near-equal parts
  bool operator==(const EqualParts&) const = default;
};
// Makes parts in proportion to the devices' speed, measured while they train (balance.hpp). Without a grain two runs
// then differ by rounding, also if one was resumed.
struct PartsBySpeed {
  bool operator==(const PartsBySpeed&) const = default;
};
// A list such as {2, 1} gives the first device twice as many samples as the second. If the network is split, the list
// is for its data axis.
using BalanceRule = std::variant<EqualParts, PartsBySpeed, std::vector<double>>;

// Gives "equal", "auto" or "2,1". balance_rule_from converts back. It throws Error with the possible texts for any
// other text.
std::string to_string(const BalanceRule& sizes);
BalanceRule balance_rule_from(const std::string& text);

// Ranks compute whole grains (BatchOptions::grain), and the run gives the same bits however many ranks there are and
// whatever each of them gets. A number stands for grains of so many samples: `.grain = 32`.
struct Grains {
  Grains(int64_t of_samples, double checked_fraction = 0) : samples(of_samples), check_arithmetic(checked_fraction) {}
  int64_t samples;  // samples of a grain, from 1 to those of a batch
  // Fraction of the grains, from 0 to 1, that another device computes again, and compares to the bit
  // (lockstep/lab/check_arithmetic.hpp). It needs the whole network on each rank. 0: none.
  double check_arithmetic;
};

struct BatchSettings {
  int64_t size = 256;  // samples of the global batch, before it is multiplied by `scale`
  int64_t scale = 1;
  bool drop_last = false;  // an epoch leaves out a last batch that is smaller (BatchOptions::drop_last)
  // A rank divides its part of a batch into so many parts, and computes one after the other. Memory then holds the
  // activations of one of them at a time. The gradients are the same, but BatchNorm normalises over one of them.
  int accumulate = 1;
  BalanceRule balance = EqualParts();
  std::optional<Grains> grain = {};

  int64_t global() const { return size * scale; }  // samples of a step, over all ranks
};

enum class Precision {
  float32,
  tf32,  // float32 whose products round their factors to TF32; on NVIDIA GPUs alone
  bf16,  // forward and loss in automatic mixed precision (autocast.hpp), weights and update in float32
};

// Says how images lie in memory. The results are the same but for rounding.
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

// Has the options of the update. RateOptions has the learning rate.
struct OptimizerOptions {
  OptimizerKind kind = OptimizerKind::sgd;
  double momentum = 0;  // momentum; for it and weight_decay see OptimizerSettings in optimizers.hpp
  double weight_decay = 0;
  double clip = 0;  // the largest norm of a step's gradients, which are scaled down to it; 0: none
};

// Has the values of a LearningRate that a user sets. The run adds its batch and epochs.
struct RateOptions {
  std::optional<double> lr = {};  // the rate for reference_batch samples; none: the optimizer's default_learning_rate
  int64_t reference_batch = 0;    // a number of samples; 0: the run's batch before it is scaled
  LearningRate::Scaling scaling = LearningRate::Scaling::none;
  double warmup_epochs = 0;
  LearningRate::Schedule schedule = LearningRate::Schedule::constant;
  std::vector<int> step_epochs = {};
  double step_factor = 0.1;
};

// Describes the rate: "0.2"; "0.2, linear for 2048 / 256 samples = 1.6, from 0.2 over 5 epochs of warm-up, cosine".
std::string to_string(const LearningRate& rate);

struct Checkpoints {
  int last = 2;       // checkpoints to resume from, beside the best epoch's; at least 1
  int64_t every = 0;  // steps between two checkpoints within an epoch; 0: only at the end of each epoch
};

// Says which files a run keeps, and which checkpoint it goes on from.
struct KeepOptions {
  std::filesystem::path run_dir = {};  // the run's folder; give one without another run. Empty: nothing is written
  std::optional<Checkpoints> checkpoints = Checkpoints();  // checkpoints in run_dir; none: it gets none
  bool tensorboard = false;                                // run_dir also gets an event file for TensorBoard
  // File for a trace of some of the first steps, as Chrome's JSON; empty: none. A launcher's process N traces its own
  // ranks alone, in a file with .N before the extension.
  std::filesystem::path trace = {};
  // Checkpoint to go on from; the results are those of a run that never stopped. Empty: none. A run's folder means its
  // newest whole checkpoint, and on_warning is told of a damaged one; run_dir may be that folder. "auto" means the run
  // in run_dir if it has a checkpoint, or else a new one, also in the place of a run that was killed before the first
  // checkpoint.
  std::filesystem::path resume = {};
};

struct TrainOptions {
  ModelOptions model = {};
  DataSource data = FashionMnist();
  Devices devices = {};               // one rank per entry; empty: default_devices()
  int threads_per_rank = 1;           // intra-op threads of each rank
  Way way = Averaged();               // way in which the ranks share the work
  bool cuda_graph = false;            // the step of a full batch is recorded once as a CUDA graph and replayed: on GPUs
  std::chrono::seconds timeout{300};  // limit of a rank's wait for another, from 1 to 1,000,000
  std::chrono::seconds silence{0};    // see RunOptions::silence; from 0 to 1,000,000
  BatchSettings batch = {};
  OptimizerOptions optimizer = {};
  RateOptions rate = {};
  int epochs = 10;
  uint64_t seed = 1;  // seed of the first weights, the order of the samples (docs/results says why 1), and dropout
  OnNan on_nan = OnNan::stop;
  // Steps between two checks that the devices hold the same weights and optimizer states (check_replicas.hpp), and with
  // batch.grain the same running statistics. A check comes before a step's update, with local SGD at the end of a
  // round, and one more at the end of each epoch. What one device alone has (slices of ZeRO, parts of a split, local
  // SGD's optimizers, all of a single device) must not change between two updates: so 1 covers every step. -1: only the
  // end of each epoch has a check, which compares two copies and nothing else. 0: none.
  int64_t check_replicas = -1;
  Precision precision = Precision::float32;
  MemoryFormat memory_format = MemoryFormat::automatic;
  // BatchNorm normalises over the samples of all ranks (sync_batch_norm.hpp). Give a model that has a BatchNorm.
  bool sync_batchnorm = false;
  KeepOptions keep = {};
};

// to_json gives all options but resume, trace, timeout and silence as JSON text, enough to run again, and throws Error
// for a path that is not UTF-8. train_options_from_json converts back. It throws Error, which names the key, for an
// unknown key or a value of another type or out of range. No value is rounded or cut, and absent keys keep their
// defaults. It reads texts of lockstep 0.1 too. The text's devices must be on this machine, unless `devices` names
// others in their place.
std::string to_json(const TrainOptions& options);
TrainOptions train_options_from_json(const std::string& text, const Devices& devices = {});

}  // namespace lockstep

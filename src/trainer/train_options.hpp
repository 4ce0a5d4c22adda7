// Checks a run's options before it starts, fills in defaults, and reads the options that a run's folder keeps.
#pragma once

#include <lockstep/lab/optimizers.hpp>
#include <lockstep/optim/learning_rate.hpp>
#include <lockstep/trainer/trainer.hpp>

#include <cstdint>
#include <filesystem>
#include <string>

namespace lockstep {

// Gives the options with every default filled in. Throws Error for each value that cannot be trained with.
TrainOptions checked(TrainOptions options);

// Does the same for the options of a fit(), whose network is known by its name alone.
TrainOptions checked_for_fit(TrainOptions options);

// Tells whether `model` is one of lockstep's, and not the network of a fit().
bool is_of_lockstep(const TrainOptions& options);

// Fills in the defaults that depend on the machine, the model and the optimizer: devices, memory_format, lr.
void fill_defaults(TrainOptions& options);

// Says how the network is split over the run's ranks.
ModelSplit split_of(const TrainOptions& options, int ranks);

// Gives the options of the update.
LearningRate learning_rate_of(const TrainOptions& options);
OptimizerSettings optimizer_settings(const TrainOptions& options);

// Throws Error if so many training samples do not make a single batch of the options' size.
void check_batch_size(const TrainOptions& options, int64_t samples, const std::string& source);

// Gives checked options' precision and memory_format, as the code needs them.
bool computes_in_bf16(const TrainOptions& options);
at::MemoryFormat memory_format(const TrainOptions& options);

inline constexpr const char* kConfigFile = "config.json";
inline constexpr const char* kMetricsFile = "metrics.jsonl";
inline constexpr const char* kWeightsFile = "model.safetensors";
inline constexpr const char* kNotesFile = "notes.json";
inline constexpr const char* kReportFile = "report.html";
inline constexpr const char* kCheckpointFolder = "checkpoints";

// Reads the options of the run in `run_dir`, but with these devices, since the run's own may be those of another
// machine. Throws Error if there is none.
TrainOptions read_config(const std::filesystem::path& run_dir, const Devices& devices);

}  // namespace lockstep

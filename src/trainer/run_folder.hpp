// RunFolder: the files that a run keeps. Each is replaced whole, so that earlier files stay readable after a failure.
#pragma once

#include <torch/nn/module.h>
#include <lockstep/trainer/metrics.hpp>
#include <lockstep/trainer/trainer.hpp>

#include <chrono>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "io/file_system.hpp"
#include "io/folder_lock.hpp"
#include "measures.hpp"
#include "run_notes.hpp"
#include "run_state.hpp"

namespace lockstep {

// Removes the files that a run keeps in `folder`. config.json goes last: until then the other files are known as this
// run's. Throws Error if a process trains there, or if the folder cannot be locked.
void clear_run(const std::filesystem::path& folder);

class RunFolder {
 public:
  // Writes nothing yet, and with an empty path never writes. Throws Error of `run_dir` if a file is there that a run
  // would overwrite, unless it belongs to the run that `goes_on`. `files` is where checkpoints are written.
  explicit RunFolder(std::filesystem::path folder, bool goes_on = false, io::FileSystem& files = io::real_files());

  // If nothing is kept that a run can be resumed from or evaluated, removes the run's files. Then it also removes the
  // folders that create() made, if they are empty.
  ~RunFolder();
  RunFolder& operator=(RunFolder&&) = delete;

  // Makes the folder and writes config.json, which makes it this run's own. `judge` says which epoch is the best.
  // Throws Error of `run_dir` if another run was first at the same time. Throws Error if the folder cannot be written,
  // or if another process trains in it. Warns where the folder cannot be locked, and then refuses nobody.
  using Warn = std::function<void(const std::string&)>;
  void create(const TrainOptions& options, const Judge& judge, Warn warn);

  // Lets the report's files have the notes, and gives them those of the run that goes on. Keep them alive.
  void take(RunNotes& notes);

  // Writes metrics.jsonl and model.safetensors after an epoch. Some seconds after the last time it also writes
  // notes.json and report.html. A report that cannot be written is a warning.
  void write(const std::vector<EpochMetrics>& history, const torch::nn::Module& module);

  // Writes a checkpoint, and keeps no more of the earlier ones than the options say.
  void keep(const RunState& state);

  // Writes the report. Call it at the end, however the run ended. Throws Error if the folder is gone, or its weights,
  // which somebody may have removed while the run trained.
  void finish(const std::vector<EpochMetrics>& history);

 private:
  void remove_temporaries();
  void restore_config();
  void report();

  std::filesystem::path folder_;
  const bool goes_on_;
  io::FileSystem& files_;
  io::FolderLock lock_;
  std::vector<std::filesystem::path> made_;  // folders made by this object, the topmost first
  std::string config_;                       // the text of config.json
  bool synthetic_ = false;
  int keep_last_ = 0;
  Judge judge_;
  Warn warn_;
  bool claimed_ = false;      // the files in the folder are this run's
  bool kept_ = false;         // an epoch is complete, or a checkpoint written: the files stay
  bool has_weights_ = false;  // this object has written an epoch's weights
  RunNotes* notes_ = nullptr;
  std::optional<std::chrono::steady_clock::time_point> reported_;  // when an epoch's report was written
};

}  // namespace lockstep

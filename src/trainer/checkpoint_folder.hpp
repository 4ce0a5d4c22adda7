// CheckpointFolder: a run's checkpoints, one file each: the last few, and the best epoch's.
//
//   epoch-0003.safetensors              after epoch 3
//   epoch-0003-step-000120.safetensors  120 steps later
// Write in the folder from one process at a time.
#pragma once

#include <filesystem>
#include <functional>
#include <string>

#include "io/file_system.hpp"
#include "measures.hpp"
#include "run_state.hpp"

namespace lockstep {

class CheckpointFolder {
 public:
  CheckpointFolder(std::filesystem::path folder, int keep_last, io::FileSystem& files = io::real_files(),
                   Judge judge = {});

  // Writes a checkpoint. When it is on the disk, removes checkpoints before the last keep_last, except the best
  // epoch's. It also removes later checkpoints, of a run with another past, and the files that killed processes left.
  // Throws Error if it cannot be written; the others then stay.
  void write(const RunState& state);

 private:
  void remove_others(const RunState& state);

  std::filesystem::path folder_;
  int keep_last_;
  io::FileSystem& files_;
  Judge judge_;
};

// Gives the file of the run's newest checkpoint; empty if there is none.
std::filesystem::path newest_checkpoint(const std::filesystem::path& folder);

// Gives the checkpoint to go on from: the folder's newest one that is not damaged. If a newer one is damaged, `warn` is
// told. Empty if the folder has none. Reads the checkpoint. Throws Error if all are damaged.
std::filesystem::path checkpoint_to_go_on(const std::filesystem::path& folder,
                                          const std::function<void(const std::string&)>& warn);

// Reads a checkpoint as read_run_state does. If the run cannot go on from this checkpoint, the Error names the newest
// whole one before it.
RunState read_checkpoint(const std::filesystem::path& file);

}  // namespace lockstep

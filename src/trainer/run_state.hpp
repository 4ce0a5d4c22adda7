// RunState: all that a run needs to go on as if it had never been stopped, and the file that keeps it.
//
// The file is a safetensors file, with nothing executable in it: Python's safetensors.torch.load_file reads the
// tensors. Its header has, as text, a manifest (JSON: the position, the metrics, the run's configuration) and the
// SHA-256 of everything. It is replaced whole, and is on the disk when write_run_state returns.
#pragma once

#include <lockstep/trainer/metrics.hpp>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "data/data_digests.hpp"
#include "io/safetensors.hpp"

namespace lockstep {

struct RunState {
  int epochs = 0;                     // that are finished
  int64_t steps = 0;                  // of the epoch after them. The sampler's order is of seed, epoch and step alone
  double seconds = 0;                 // that these steps took
  std::vector<EpochMetrics> history;  // of the finished epochs
  std::string config;                 // as to_json(TrainOptions) gives it
  // "model.conv1.weight": the whole network's parameters and buffers, whatever the split; "optimizer.MEMBER.PARAMETER"
  // (see optimizer_state.hpp); "query.PARAMETER" of PowerSgdHook, "outer.PARAMETER" of LocalSgd; "ranks.totals",
  // "ranks.rng", "ranks.order", "ranks.buffers.NAME", "ranks.error.PARAMETER" and "ranks.optimizer.MEMBER.PARAMETER": a
  // row per rank (see rank_trainer_state.cpp); "trainer.left_out": samples of the epoch's skipped steps, if there are
  // any
  io::NamedTensors tensors;
  std::optional<DataDigests> data = {};  // what it was trained on; checkpoints of before do not say
};

// Throws Error that names the file; what is there under its name stays, or is the new one, whole.
void write_run_state(const std::filesystem::path& file, const RunState& state,
                     io::FileSystem& files = io::real_files());

// Throws Error that names the file and says what is wrong: no safetensors file, one that is not such a checkpoint, one
// of another version of the format, or bytes that are not those that were written.
RunState read_run_state(const std::filesystem::path& file);

// The tensors under "PREFIX.", without it; and the other way round.
io::NamedTensors tensors_under(const std::string& prefix, const io::NamedTensors& tensors);
void put_under(const std::string& prefix, const io::NamedTensors& tensors, io::NamedTensors& into);

}  // namespace lockstep

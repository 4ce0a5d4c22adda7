// RunState: everything that a run needs to go on as if it had never stopped, and the state's file.
//
// The file is a safetensors file without anything executable: Python's safetensors.torch.load_file reads the tensors.
// Its header has two texts: a manifest (JSON: the position, the metrics, the run's configuration), and the SHA-256 of
// everything. It is replaced whole, and is on the disk when write_run_state returns.
#pragma once

#include <lockstep/ranks/rank.hpp>
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
  int epochs = 0;                     // finished epochs
  int64_t steps = 0;                  // steps of the next epoch; seed, epoch and step alone give the samples' order
  double seconds = 0;                 // seconds of these steps
  std::vector<EpochMetrics> history;  // metrics of the finished epochs
  std::string config;                 // text of to_json(TrainOptions)
  // The tensors' names. Names that begin with "ranks." have a row per rank (see rank_trainer_state.cpp).
  //   model.NAME                  the whole network's parameters and buffers, whatever the split
  //   optimizer.MEMBER.PARAMETER  see optimizer_state.hpp
  //   query.PARAMETER             of PowerSgdHook
  //   outer.PARAMETER             of LocalSgd
  //   ema.PARAMETER               the average of the weights, if a Task has an ema_decay
  //   trainer.ema_decay           that decay
  //   trainer.left_out            samples of the epoch's skipped steps, if there are any
  //   trainer.loss                with a grain: the sum of the epoch's losses so far
  //   ranks.totals, ranks.rng, ranks.order
  //   ranks.buffers.NAME, ranks.error.PARAMETER, ranks.optimizer.MEMBER.PARAMETER
  io::NamedTensors tensors;
  std::optional<DataDigests> data = {};  // its data's digests; older checkpoints have none
  std::string processor = {};            // rank 0's processor (devices/processor_kind.hpp); empty: not known
};

// Writes the file. Throws Error that names it; then the file under this name is the old one or the new one, whole.
void write_run_state(const std::filesystem::path& file, const RunState& state,
                     io::FileSystem& files = io::real_files());

// Reads the file. Throws Error, with the file's name and what is wrong: no safetensors file, no such checkpoint,
// another version of the format, or other bytes than were written.
RunState read_run_state(const std::filesystem::path& file);

// These turn a state without tensors into a text and back. They throw Error that says what is wrong with the text.
std::string manifest_of(const RunState& state);
RunState parse_manifest(const std::string& manifest);

// Gives the tensors with names "PREFIX.…", under the rest of their names. put_under() does the reverse.
io::NamedTensors tensors_under(const std::string& prefix, const io::NamedTensors& tensors);
void put_under(const std::string& prefix, const io::NamedTensors& tensors, io::NamedTensors& into);

// Gathers each rank's tensors into tables, "ranks.NAME", with a row for each rank. Call it on all ranks.
io::NamedTensors tables_of_all_ranks(const io::NamedTensors& mine, Rank& rank);

// Throws Error for a table that cannot be one. Whatever the digest says, a table is believed only as far as its shape
// goes.
void check_tables(const RunState& state);

}  // namespace lockstep

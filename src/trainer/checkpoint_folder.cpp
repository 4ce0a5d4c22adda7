#include "checkpoint_folder.hpp"

#include <lockstep/base/error.hpp>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <optional>
#include <system_error>
#include <utility>
#include <vector>

#include "io/atomic_file.hpp"
#include "io/links.hpp"

namespace lockstep {
namespace {

namespace fs = std::filesystem;
using Position = std::pair<int, int64_t>;  // numbers of finished epochs and of steps since

struct Checkpoint {
  Position position;
  fs::path file;
  bool operator<(const Checkpoint& other) const { return position < other.position; }
};

std::string file_name_of(const Position& position) {
  const auto& [epochs, steps] = position;
  char name[64];
  if (steps == 0) {
    std::snprintf(name, sizeof name, "epoch-%04d.safetensors", epochs);
  } else {
    std::snprintf(name, sizeof name, "epoch-%04d-step-%06lld.safetensors", epochs, static_cast<long long>(steps));
  }
  return name;
}

// A file is no checkpoint if its position gives another name.
std::optional<Position> position_of(const fs::path& file) {
  const std::string name = file.filename().string();
  int epochs = -1;
  long long steps = 0;
  std::sscanf(name.c_str(), "epoch-%9d-step-%18lld", &epochs, &steps);
  const Position position(epochs, steps);
  if (epochs < 0 || steps < 0 || name != file_name_of(position)) return std::nullopt;
  return position;
}

// Gives the checkpoints sorted by their positions.
std::vector<Checkpoint> checkpoints_in(const fs::path& folder) {
  std::vector<Checkpoint> found;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    if (const auto position = position_of(entry.path())) found.push_back({*position, entry.path()});
  }
  std::sort(found.begin(), found.end());
  return found;
}

// Gives the newest whole checkpoint before `file` in its folder; empty if there is none.
fs::path whole_checkpoint_before(const fs::path& file) {
  auto candidates = checkpoints_in(file.has_parent_path() ? file.parent_path() : ".");
  if (const auto position = position_of(file)) {
    std::erase_if(candidates, [&](const Checkpoint& candidate) { return candidate.position >= *position; });
  }
  for (auto candidate = candidates.rbegin(); candidate != candidates.rend(); ++candidate) {
    try {
      read_run_state(candidate->file);
      return candidate->file;
    } catch (const Error&) {  // tries the next one
    }
  }
  return {};
}

}  // namespace

CheckpointFolder::CheckpointFolder(fs::path folder, int keep_last, io::FileSystem& files, Judge judge)
    : folder_(std::move(folder)), keep_last_(keep_last), files_(files), judge_(std::move(judge)) {}

void CheckpointFolder::write(const RunState& state) {
  std::error_code error;
  const fs::path place = io::behind_links(folder_);
  if (fs::create_directory(place, error) && files_.sync_folder(place.parent_path()) != 0) {
    error = std::error_code(errno, std::generic_category());
  }
  if (error) throw Error("cannot make the folder " + folder_.string() + ": " + error.message(), {Error::file});
  write_run_state(folder_ / file_name_of({state.epochs, state.steps}), state, files_);
  remove_others(state);
}

// A checkpoint that cannot be removed only takes room.
void CheckpointFolder::remove_others(const RunState& state) {
  const Position newest{state.epochs, state.steps}, best{best_epoch(state.history, judge_), 0};
  auto others = checkpoints_in(folder_);
  for (; !others.empty() && others.back().position > newest; others.pop_back()) files_.unlink(others.back().file);
  const size_t last = std::min(others.size(), static_cast<size_t>(keep_last_));
  others.resize(others.size() - last);
  for (const auto& [position, file] : others) {
    if (position != best) files_.unlink(file);
  }
  for (const auto& file : io::temporaries_in(folder_)) files_.unlink(file);
}

fs::path newest_checkpoint(const fs::path& folder) {
  const auto found = checkpoints_in(folder);
  return found.empty() ? fs::path() : found.back().file;
}

fs::path checkpoint_to_go_on(const fs::path& folder, const std::function<void(const std::string&)>& warn) {
  const fs::path newest = newest_checkpoint(folder);
  if (newest.empty()) return newest;
  try {
    read_run_state(newest);
    return newest;
  } catch (const Error& error) {
    const fs::path other = whole_checkpoint_before(newest);
    if (other.empty()) throw Error(error.what() + std::string("; there is no whole one before it"), error.data());
    if (warn) warn(error.what() + ("; the run goes on from " + other.string()));
    return other;
  }
}

RunState read_checkpoint(const fs::path& file) {
  try {
    return read_run_state(file);
  } catch (const Error& error) {
    const fs::path other = whole_checkpoint_before(file);
    throw Error(error.what() + (other.empty() ? ". There is no whole one before it; the run has to begin anew"
                                              : ". The newest whole one before it: `resume` " + other.string()),
                error.data());
  }
}

}  // namespace lockstep

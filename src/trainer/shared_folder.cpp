#include "shared_folder.hpp"

#include <unistd.h>
#include <lockstep/base/error.hpp>

#include "comm/meeting/launch_environment.hpp"
#include "io/atomic_file.hpp"
#include "ranks/gather.hpp"

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <system_error>
#include <thread>

namespace lockstep {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kUntilSeen{2'000};  // a network's file system may take a moment
constexpr const char* kStart = ".generation-";

bool on_several_machines() {
  const auto launch = comm::read_launch_environment(std::getenv);
  return launch && launch->local_world_size < launch->world_size;
}

bool is_seen(const fs::path& file) {
  std::error_code none;
  for (const auto deadline = Clock::now() + kUntilSeen; !fs::exists(file, none);) {
    if (Clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return true;
}

// A rank that was killed may have left one.
void remove_files(const fs::path& run) {
  std::error_code none;
  for (const auto& entry : fs::directory_iterator(run, none)) {
    if (entry.path().filename().string().starts_with(kStart)) fs::remove(entry.path(), none);
  }
}

}  // namespace

void check_shared_folder(const fs::path& run, int generation, Rank& rank) {
  if (run.empty() || !rank.any(on_several_machines())) return;  // one that came later knows that there are several
  const std::string name = shared_text(
      rank.index() == 0 ? kStart + std::to_string(generation) + "-" + std::to_string(getpid()) : "", rank, 0);
  if (rank.index() == 0) {
    remove_files(run);
    io::create_file(run / name);
  }
  rank.barrier();  // it is there
  const auto seen = of_all_ranks(rank, {static_cast<int64_t>(is_seen(run / name))});
  if (rank.index() == 0) remove_files(run);
  std::string blind;
  for (int other = 0; other < rank.world_size(); ++other) {
    if (seen[other][0].item<int64_t>() == 0) blind += (blind.empty() ? "rank " : ", rank ") + std::to_string(other);
  }
  if (blind.empty()) return;
  throw Error("the run's folder " + fs::absolute(run).string() + " is not the same one on all machines: " + blind +
              " of " + std::to_string(rank.world_size()) +
              " did not see what rank 0 wrote there. In an elastic job on several machines any process may have to go "
              "on with it: put it where all of them see it, such as on NFS");
}

}  // namespace lockstep

#include "train_as_node.hpp"

#include <lockstep/base/error.hpp>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "launched_job.hpp"
#include "usage.hpp"

namespace lockstep::cli {
namespace {

constexpr int kMostNodes = 1024;  // as of lockstep launch --max-nodes

std::vector<std::string> own_words() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  std::vector<std::string> words;
  for (std::string word; std::getline(file, word, '\0');) words.push_back(word);
  words.at(0) = std::filesystem::read_symlink("/proc/self/exe").string();
  return words;
}

// What started this process.
comm::LaunchEnvironment checked_launch(const ElasticBounds& bounds) {
  const auto launch = comm::read_launch_environment(std::getenv);
  if (!launch) {
    throw UsageError(
        "--elastic needs several processes. On one machine: lockstep launch -n N --elastic lockstep train … . On "
        "several: the same on each, with --nodes, --node and --master; or srun, mpirun or torchrun --no-python "
        "lockstep "
        "train --elastic MIN:MAX …; or by hand, with RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and "
        "MASTER_PORT");
  }
  if (launch->member >= 0) return *launch;
  if (launch->agent_store && !launch->tcp_store) {
    throw UsageError("--elastic is for lockstep launch too: lockstep launch -n N --elastic lockstep train …");
  }
  if (bounds.most > kMostNodes) {
    throw UsageError("--elastic " + to_string(bounds) + " asks for more than " + std::to_string(kMostNodes) +
                     " processes");
  }
  if (launch->world_size < bounds.fewest || launch->world_size > bounds.most) {
    throw UsageError("--elastic " + to_string(bounds) + " does not go with the " + std::to_string(launch->world_size) +
                     (launch->world_size == 1 ? " process that " : " processes that ") + launch->launcher + " started");
  }
  return *launch;
}

}  // namespace

std::optional<int> train_as_node(const ElasticBounds& bounds) {
  const auto launch = checked_launch(bounds);
  if (launch.member >= 0) return std::nullopt;
  LaunchFlags flags{.processes = 1,
                    .elastic = true,
                    .nodes = nodes_started_by(launch),
                    .fewest = bounds.fewest,
                    .words = own_words()};
  flags.nodes.most = bounds.most;
  LaunchMessages messages;
  return launch_elastic(flags, messages).code;
}

}  // namespace lockstep::cli

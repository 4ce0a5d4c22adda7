#include "launched_job.hpp"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <sstream>
#include <system_error>

#include "text.hpp"

namespace lockstep::cli {
namespace {

bool is_on_path(const std::string& program) {
  const char* const path = std::getenv("PATH");
  std::istringstream folders(path == nullptr ? "" : path);
  for (std::string folder; std::getline(folders, folder, ':');) {
    if (access((std::filesystem::path(folder) / program).c_str(), X_OK) == 0) return true;
  }
  return false;
}

}  // namespace

std::vector<std::string> variables(const LaunchFlags& flags, const JobStore& store, int attempt, int place,
                                   std::optional<int> member) {
  const std::string rank = std::to_string(place), count = std::to_string(flags.processes);
  const std::string port = std::to_string(store.port);
  std::vector<std::string> variables = {"RANK=" + rank,
                                        "LOCAL_RANK=" + rank,
                                        "WORLD_SIZE=" + count,
                                        "LOCAL_WORLD_SIZE=" + count,
                                        "MASTER_ADDR=" + store.address,
                                        "MASTER_PORT=" + port,
                                        "LOCKSTEP_STORE_PORT=" + port,
                                        "LOCKSTEP_JOB_KEY_FILE=" + store.key_file,
                                        "TORCHELASTIC_USE_AGENT_STORE=True",
                                        "TORCHELASTIC_RESTART_COUNT=" + std::to_string(attempt),
                                        "TORCHELASTIC_MAX_RESTARTS=" + std::to_string(flags.restarts())};
  // An empty value resets what another launcher may have set.
  variables.push_back("LOCKSTEP_ELASTIC_MEMBER=" + (member ? std::to_string(*member) : ""));
  if (member) variables.push_back("LOCKSTEP_ELASTIC_MIN=" + std::to_string(flags.fewest));
  const char* const threads = std::getenv("OMP_NUM_THREADS");
  if (flags.threads || (threads == nullptr && flags.processes > 1)) {
    variables.push_back("OMP_NUM_THREADS=" + std::to_string(flags.threads.value_or(1)));
  }
  return variables;
}

comm::LaunchEnvironment environment_of(const std::vector<std::string>& variables) {
  return *comm::read_launch_environment([&](const char* name) -> const char* {
    const std::string start = std::string(name) + "=";
    const auto found = std::find_if(variables.begin(), variables.end(),
                                    [&](const std::string& variable) { return variable.starts_with(start); });
    return found == variables.end() ? nullptr : found->c_str() + start.size();
  });
}

// In a checkout this program is not on PATH, but people write its name.
std::vector<std::string> program_words(const LaunchFlags& flags) {
  auto words = flags.words;
  if (words[0] != "lockstep" || is_on_path(words[0])) return words;
  std::error_code error;
  const auto itself = std::filesystem::read_symlink("/proc/self/exe", error);
  if (!error) words[0] = itself.string();
  return words;
}

}  // namespace lockstep::cli

#include "launched_job.hpp"

#include <unistd.h>
#include <lockstep/base/error.hpp>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <sstream>
#include <system_error>

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

std::vector<std::string> variables(const LaunchFlags& flags, const JobStore& store, int attempt, int place) {
  const auto [local, locals] = flags.nodes.local.value_or(std::pair(place % flags.processes, flags.processes));
  const std::string port = std::to_string(store.port);
  std::vector<std::string> variables = {"RANK=" + std::to_string(place),
                                        "LOCAL_RANK=" + std::to_string(local),
                                        "WORLD_SIZE=" + std::to_string(std::max(flags.all_processes(), place + 1)),
                                        "LOCAL_WORLD_SIZE=" + std::to_string(locals),
                                        "MASTER_ADDR=" + store.address,
                                        "MASTER_PORT=" + port,
                                        "LOCKSTEP_STORE_PORT=" + port,
                                        "LOCKSTEP_JOB_KEY_FILE=" + store.key_file,
                                        "TORCHELASTIC_USE_AGENT_STORE=True",
                                        "TORCHELASTIC_RESTART_COUNT=" + std::to_string(attempt),
                                        "TORCHELASTIC_MAX_RESTARTS=" + std::to_string(flags.restarts())};
  const char* const threads = std::getenv("OMP_NUM_THREADS");
  if (flags.threads || (threads == nullptr && flags.processes > 1)) {
    variables.push_back("OMP_NUM_THREADS=" + std::to_string(flags.threads.value_or(1)));
  }
  return variables;
}

std::vector<std::string> elastic_variables(const LaunchFlags& flags, const JobStore& store, int place, int member) {
  auto all = variables(flags, store, /*attempt=*/0, place);
  all.push_back("LOCKSTEP_ELASTIC_MEMBER=" + std::to_string(member));
  all.push_back("LOCKSTEP_ELASTIC_MIN=" + std::to_string(flags.fewest));
  return all;
}

// At MASTER_ADDR and MASTER_PORT there is torchrun's own store, so the job's takes a free port. The workers' restart
// counts say nothing of the job: each of torchrun's agents counts the failures of its own workers.
Nodes nodes_started_by(const comm::LaunchEnvironment& launch) {
  const bool on_one_machine = launch.local_world_size == launch.world_size;
  Nodes nodes{.node = launch.rank,
              .count = launch.world_size,
              .most = launch.world_size,
              .address = launch.by_torchrun && on_one_machine ? "" : launch.address,
              .port = launch.tcp_store ? 0 : launch.port,
              .address_name = "MASTER_ADDR and MASTER_PORT",
              .job = launch.by_torchrun ? "torchrun-" + std::string(std::getenv("TORCHELASTIC_RUN_ID")) : launch.job,
              .on_one_machine = on_one_machine,
              .how_to_start_one = "Start it there as this one was",
              .local = std::pair(launch.local_rank, launch.local_world_size)};
  if (launch.tcp_store) nodes.port_told_in = comm::StorePlace{launch.address, launch.port};
  return nodes;
}

comm::LaunchEnvironment environment_of(const std::vector<std::string>& variables) {
  return *comm::read_launch_environment([&](const char* name) -> const char* {
    const std::string start = std::string(name) + "=";
    const auto found = std::find_if(variables.begin(), variables.end(),
                                    [&](const std::string& variable) { return variable.starts_with(start); });
    return found == variables.end() ? nullptr : found->c_str() + start.size();
  });
}

// In a checkout this program has no place on PATH, but people write its name.
std::vector<std::string> program_words(const LaunchFlags& flags) {
  auto words = flags.words;
  if (words[0] != "lockstep" || is_on_path(words[0])) return words;
  std::error_code error;
  const auto itself = std::filesystem::read_symlink("/proc/self/exe", error);
  if (!error) words[0] = itself.string();
  return words;
}

comm::LaunchEnvironment environment_of_node(const LaunchFlags& flags) {
  const Nodes& nodes = flags.nodes;
  return {.launcher = "lockstep launch --nodes",
          .rank = nodes.node,
          .world_size = std::max(nodes.count, nodes.node + 1),
          .local_rank = nodes.on_one_machine ? nodes.node : 0,
          .local_world_size = nodes.on_one_machine ? std::max(nodes.count, nodes.node + 1) : 1,
          .address = nodes.address,
          .port = nodes.port,
          .port_told_in = nodes.port_told_in,
          .job = nodes.job.empty() ? "nodes" : nodes.job,
          .key_file = checked_key_file(nodes),
          .node_address_name = nodes.address_name};
}

std::string checked_key_file(const Nodes& nodes) {
  const char* const file = std::getenv("LOCKSTEP_JOB_KEY_FILE");
  if (file != nullptr && *file != '\0') return file;
  if (nodes.on_one_machine && is_on_loopback(nodes.address)) return "";
  throw Error(
      "an elastic job on several machines needs a key, or everybody on the network could join it. Make one with "
      "(umask 077; head -c 32 /dev/urandom >job.key), copy it to all machines, and set LOCKSTEP_JOB_KEY_FILE to its "
      "path" +
      std::string(nodes.on_one_machine ? "; or, on one machine alone, set " + nodes.address_name + " to 127.0.0.1"
                                       : ""));
}

bool is_on_loopback(const std::string& address) {
  return address.empty() || address == "localhost" || address == "::1" || address.starts_with("127.");
}

std::chrono::milliseconds patience_with_others() {
  return comm::rendezvous_timeout_in(std::getenv).value_or(std::chrono::seconds(60));
}

}  // namespace lockstep::cli

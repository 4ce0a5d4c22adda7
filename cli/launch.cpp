// lockstep launch: starts a program several times on this machine, as ranks of one job.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <system_error>
#include <vector>

#include "child_processes.hpp"
#include "comm/meeting/meeting.hpp"
#include "commands.hpp"
#include "flag_checks.hpp"
#include "output.hpp"
#include "printed_once.hpp"
#include "text.hpp"

namespace lockstep::cli {

namespace {

const char* const launch_examples =
    "Examples:\n"
    "  lockstep launch -n 2 lockstep train --devices cpu\n"
    "      Two processes with one CPU rank each.\n"
    "  lockstep launch -n 2 ./my_program --its-own-flag\n"
    "      Any program that calls lockstep::run; the same program as for torchrun\n"
    "      --no-python, mpirun or srun, which start processes on several machines.\n"
    "\n"
    "Each process finds its place in torchrun's variables: RANK, LOCAL_RANK,\n"
    "WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT. Signals are passed on.\n"
    "If a process fails, ranks that wait for it are told at once and say why they\n"
    "end; whatever still runs 2 s later gets SIGTERM, and 3 s after that SIGKILL. The\n"
    "exit code is that of the first that failed. Nothing that they started stays.\n"
    "A job that failed is started again from the start with --max-restarts; with\n"
    "lockstep train --resume auto --name NAME it goes on from its last checkpoint.\n"
    "A lockstep command that would fail in the same way does not start again: wrong\n"
    "flags (exit code 2), a loss that is not finite (3, see --on-nan of train).\n"
    "With --keep-going the others go on without a process that is killed while all\n"
    "of its ranks are workers of a ParameterServer that is not synchronous.\n";

struct LaunchFlags {
  int processes = 0;
  std::optional<int> threads;
  bool label = false;
  bool keep_going = false;
  int max_restarts = 0;
  int grace = 30;                  // seconds
  std::vector<std::string> words;  // the program and its arguments
};

std::vector<std::string> variables(const LaunchFlags& flags, int attempt, int rank, int port) {
  const std::string count = std::to_string(flags.processes), index = std::to_string(rank);
  std::vector<std::string> variables = {"RANK=" + index,
                                        "LOCAL_RANK=" + index,
                                        "WORLD_SIZE=" + count,
                                        "LOCAL_WORLD_SIZE=" + count,
                                        "MASTER_ADDR=127.0.0.1",
                                        "MASTER_PORT=" + std::to_string(port),
                                        "TORCHELASTIC_USE_AGENT_STORE=True",
                                        "TORCHELASTIC_RESTART_COUNT=" + std::to_string(attempt),
                                        "TORCHELASTIC_MAX_RESTARTS=" + std::to_string(flags.max_restarts)};
  variables.push_back(std::string("LOCKSTEP_KEEP_GOING=") + (flags.keep_going ? "1" : "0"));
  const char* const threads = std::getenv("OMP_NUM_THREADS");
  if (flags.threads || (threads == nullptr && flags.processes > 1)) {
    variables.push_back("OMP_NUM_THREADS=" + std::to_string(flags.threads.value_or(1)));
  }
  return variables;
}

bool is_on_path(const std::string& program) {
  const char* const path = std::getenv("PATH");
  std::istringstream folders(path == nullptr ? "" : path);
  for (std::string folder; std::getline(folders, folder, ':');) {
    if (access((std::filesystem::path(folder) / program).c_str(), X_OK) == 0) return true;
  }
  return false;
}

void check_words(const std::vector<std::string>& words) {
  if (words.empty()) throw CLI::ValidationError("the program to start is missing");
  if (words[0].starts_with("-")) throw CLI::ValidationError("launch has no option " + words[0]);
}

// In a checkout this program has no place on PATH, but people write its name.
std::vector<std::string> with_this_program(std::vector<std::string> words) {
  if (words[0] != "lockstep" || is_on_path(words[0])) return words;
  std::error_code error;
  const auto itself = std::filesystem::read_symlink("/proc/self/exe", error);
  if (!error) words[0] = itself.string();
  return words;
}

// Reads a process's variables as the process itself will.
comm::LaunchEnvironment environment_of(const std::vector<std::string>& variables) {
  return *comm::read_launch_environment([&](const char* name) -> const char* {
    const std::string start = std::string(name) + "=";
    const auto found = std::find_if(variables.begin(), variables.end(),
                                    [&](const std::string& variable) { return variable.starts_with(start); });
    return found == variables.end() ? nullptr : found->c_str() + start.size();
  });
}

// The store outlives an attempt. What the processes leave in it has the attempt's number (LaunchEnvironment::job).
ChildProcesses::Ending run_once(const LaunchFlags& flags, int attempt, const PrintedOnce& printed,
                                comm::KeptStore& store) {
  ChildProcesses::Options options{.label = flags.label, .until_term_when_stopped = std::chrono::seconds(flags.grace)};
  const auto variables_of = [&](int rank) { return variables(flags, attempt, rank, store.port); };
  options.on_end = [&](int rank, bool failed, bool stopped, const std::string& how) {
    const auto end = comm::announce_end(store.store, environment_of(variables_of(rank)), {failed, stopped, how});
    if (failed)
      printed.add("error: " + end.absence);  // ChildProcesses says how it ended; of one that succeeded, nothing
    return end.is_loss;
  };
  if (flags.keep_going) {
    options.is_lost = [&](int rank) { return comm::was_lost(store.store, environment_of(variables_of(rank))); };
  }
  ChildProcesses processes(options);  // before the store starts threads
  if (!store.store) store = comm::host_store("127.0.0.1", 0);
  const auto words = with_this_program(flags.words);
  for (int rank = 0; rank < flags.processes; ++rank) {
    auto all = variables_of(rank);
    all.push_back(printed.variable());
    processes.start(words, all);
  }
  return processes.wait();
}

int launch_command(const LaunchFlags& flags) {
  comm::KeptStore store;
  for (int attempt = 0;; ++attempt) {
    const PrintedOnce printed;
    const auto ending = run_once(flags, attempt, printed, store);
    if (!ending.failed || ending.by_request || attempt == flags.max_restarts) return ending.code;
    if (printed.would_fail_again()) {
      Output(STDERR_FILENO).print("lockstep launch: it does not start again, since it would fail in the same way\n");
      return ending.code;
    }
    Output(STDERR_FILENO)
        .print(
            format("lockstep launch: all processes start again, restart %d of %d\n", attempt + 1, flags.max_restarts));
  }
}

}  // namespace

Command add_launch(CLI::App& program) {
  CLI::App* const app =
      program.add_subcommand("launch", "Start a program several times on this machine, as ranks of one job.");
  app->footer(launch_examples);
  app->prefix_command();  // what follows the program is the program's
  const auto flags = std::make_shared<LaunchFlags>();
  app->add_option("-n,--processes", flags->processes, "how many processes to start")
      ->type_name("N")
      ->required()
      ->check(number_between<int, 1, 1024>);
  app->add_option("--threads", flags->threads,
                  "OMP_NUM_THREADS of each process (default: as it is set, or else 1 if there are several)")
      ->type_name("N")
      ->check(number_between<int, 1, 1024>);
  app->add_flag("--label", flags->label, "put the rank before every line of output: [1]");
  app->add_flag(
      "--keep-going", flags->keep_going,
      "go on without killed workers of an asynchronous parameter server; the exit code is still the killed one's");
  app->add_option("--max-restarts", flags->max_restarts,
                  "when a process fails, start all of them again, at most N times; not when a signal asked them to "
                  "end (default: 0)")
      ->type_name("N")
      ->check(number_between<int, 0>);
  app->add_option("--grace", flags->grace,
                  "how long processes may go on once they were asked to end, to write a checkpoint, before they are "
                  "ended (default: 30, as long as SLURM waits before it kills)")
      ->type_name("SECONDS")
      ->check(number_between<int, 0, 1'000'000>);
  app->callback([flags, app] {
    flags->words = app->remaining();
    check_words(flags->words);
  });
  return {app, [flags](Output&) { return launch_command(*flags); }};
}

}  // namespace lockstep::cli

// lockstep launch: starts a program several times on this machine, as ranks of one job.
#include <lockstep/error.hpp>

#include <chrono>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "child_processes.hpp"
#include "comm/rendezvous.hpp"
#include "commands.hpp"

namespace lockstep::cli {

namespace {

const char* const examples =
    "Examples:\n"
    "  lockstep launch -n 2 lockstep train --devices cpu\n"
    "      Two processes with one CPU rank each.\n"
    "  lockstep launch -n 2 ./my_program --its-own-flag\n"
    "      Any program that calls lockstep::run; the same program as for torchrun\n"
    "      --no-python, mpirun or srun, which start processes on several machines.\n"
    "\n"
    "Each process finds its place in torchrun's variables: RANK, LOCAL_RANK,\n"
    "WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT. Signals are passed on.\n"
    "If a process fails, the others have 3 s to notice, then they are ended; the exit\n"
    "code is that of the first that failed.\n";

constexpr std::chrono::seconds grace{3};

struct Flags {
  int processes = 0;
  std::optional<int> threads;
  bool label = false;
  std::vector<std::string> words;  // the program and its arguments
};

std::vector<std::string> variables(const Flags& flags, int rank, int port) {
  const std::string count = std::to_string(flags.processes), index = std::to_string(rank);
  std::vector<std::string> variables = {"RANK=" + index,
                                        "LOCAL_RANK=" + index,
                                        "WORLD_SIZE=" + count,
                                        "LOCAL_WORLD_SIZE=" + count,
                                        "MASTER_ADDR=127.0.0.1",
                                        "MASTER_PORT=" + std::to_string(port),
                                        "TORCHELASTIC_USE_AGENT_STORE=True",
                                        "TORCHELASTIC_RESTART_COUNT=0"};
  const char* const threads = std::getenv("OMP_NUM_THREADS");
  if (flags.threads || (threads == nullptr && flags.processes > 1)) {
    variables.push_back("OMP_NUM_THREADS=" + std::to_string(flags.threads.value_or(1)));
  }
  return variables;
}

void check_words(const std::vector<std::string>& words) {
  if (words.empty()) throw CLI::ValidationError("the program to start is missing");
  if (words[0].starts_with("-")) throw CLI::ValidationError("launch has no option " + words[0]);
}

int launch_command(const Flags& flags) {
  ChildProcesses processes({.label = flags.label});  // before the store starts threads
  const auto store = comm::host_store("127.0.0.1", 0);
  for (int rank = 0; rank < flags.processes; ++rank) {
    processes.start(flags.words, variables(flags, rank, store->getPort()));
  }
  return processes.wait(grace);
}

}  // namespace

Command add_launch(CLI::App& program) {
  CLI::App* const app = program.add_subcommand(
      "launch",
      "Start a program several times on this machine, as ranks of one job: launch -n N PROGRAM [ARGUMENT...].");
  app->footer(examples);
  app->prefix_command();  // what follows the program is the program's
  const auto flags = std::make_shared<Flags>();
  app->add_option("-n,--processes", flags->processes, "how many processes to start")
      ->type_name("N")
      ->required()
      ->check(CLI::Range(1, 1024));
  app->add_option("--threads", flags->threads,
                  "OMP_NUM_THREADS of each process (default: as it is set, or else 1 if N > 1)")
      ->type_name("N")
      ->check(CLI::Range(1, 1024));
  app->add_flag("--label", flags->label, "put the rank before every line of output: [1]");
  app->callback([flags, app] {
    flags->words = app->remaining();
    check_words(flags->words);
  });
  return {app, [flags](Output&) { return launch_command(*flags); }};
}

}  // namespace lockstep::cli

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
#include <utility>
#include <vector>

#include "child_processes.hpp"
#include "comm/job_key.hpp"
#include "comm/meeting/elastic_launch.hpp"
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
    "The job's own key keeps other users' programs out (LOCKSTEP_JOB_KEY_FILE).\n"
    "If a process fails, ranks that wait for it are told at once and say why they\n"
    "end; whatever still runs 2 s later gets SIGTERM, and 3 s after that SIGKILL. The\n"
    "exit code is that of the first that failed. Nothing that they started stays.\n"
    "A job that failed is started again from the start with --max-restarts; with\n"
    "lockstep train --resume auto --name NAME it goes on from its last checkpoint.\n"
    "A lockstep command that would fail in the same way does not start again: wrong\n"
    "flags (exit code 2), a loss that is not finite (3, see --on-nan of train).\n"
    "With --keep-going the others go on without a process that is killed while all\n"
    "of its ranks are workers of a ParameterServer that is not synchronous.\n"
    "With --elastic the others finish the step of one that is killed and go on, with\n"
    "the same bits, and a successor joins them: lockstep train --grain N --name NAME.\n";

struct LaunchFlags {
  int processes = 0;
  std::optional<int> threads;
  bool label = false;
  bool keep_going = false;
  bool elastic = false;
  int fewest = 1;  // processes with which an elastic job goes on
  std::optional<int> max_restarts;
  int grace = 30;                  // seconds
  std::vector<std::string> words;  // the program and its arguments
};

// What outlives an attempt to run the job: its key, and the store. What the processes leave in that has the attempt's
// number (LaunchEnvironment::job).
struct LaunchedJob {
  comm::HandedKey key;
  comm::KeptStore store;
};

int restarts_of(const LaunchFlags& flags) {
  return flags.max_restarts.value_or(flags.elastic ? 10 : 0);
}

std::vector<std::string> variables(const LaunchFlags& flags, const LaunchedJob& job, int attempt, int rank) {
  const std::string count = std::to_string(flags.processes), index = std::to_string(rank),
                    port = std::to_string(job.store.port);
  std::vector<std::string> variables = {"RANK=" + index,
                                        "LOCAL_RANK=" + index,
                                        "WORLD_SIZE=" + count,
                                        "LOCAL_WORLD_SIZE=" + count,
                                        "MASTER_ADDR=127.0.0.1",
                                        "MASTER_PORT=" + port,
                                        "LOCKSTEP_STORE_PORT=" + port,
                                        "LOCKSTEP_JOB_KEY_FILE=" + job.key.file(),
                                        "TORCHELASTIC_USE_AGENT_STORE=True",
                                        "TORCHELASTIC_RESTART_COUNT=" + std::to_string(attempt),
                                        "TORCHELASTIC_MAX_RESTARTS=" + std::to_string(restarts_of(flags))};
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

void check_elastic_launch(const LaunchFlags& flags) {
  if (!flags.elastic && flags.fewest != 1)
    throw CLI::ValidationError("--min-processes is for --elastic; give that too");
  if (flags.fewest > flags.processes) {
    throw CLI::ValidationError(
        format("--min-processes %d is more than the %d processes that start", flags.fewest, flags.processes));
  }
  if (flags.elastic && flags.keep_going) {
    throw CLI::ValidationError(
        "--keep-going is for asynchronous workers and --elastic for lockstep train; leave one of the two out");
  }
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

ChildProcesses::Ending run_once(const LaunchFlags& flags, int attempt, const PrintedOnce& printed, LaunchedJob& job) {
  ChildProcesses::Options options{.label = flags.label, .until_term_when_stopped = std::chrono::seconds(flags.grace)};
  const auto variables_of = [&](int rank) { return variables(flags, job, attempt, rank); };
  std::optional<comm::ElasticLaunch> elastic;
  options.on_end = [&](int rank, const ChildProcesses::Options::End& end) {
    const bool go_on = elastic && elastic->note_end(rank, {end.failed, end.stopped, end.how}, end.killed);
    if (go_on || (elastic && elastic->takes_part())) return go_on;
    const auto announced =
        comm::announce_end(job.store.store, environment_of(variables_of(rank)), {end.failed, end.stopped, end.how});
    if (end.failed)
      printed.add("error: " + announced.absence);  // ChildProcesses says how it ended; of one that succeeded, nothing
    return announced.is_loss;
  };
  if (flags.keep_going) {
    options.is_lost = [&](int rank) { return comm::was_lost(job.store.store, environment_of(variables_of(rank))); };
  }
  options.losses_count = !flags.elastic;
  if (flags.elastic) options.name = "process";  // a successor has another number than the rank whose place it takes
  const auto words = with_this_program(flags.words);
  const auto start = [&](ChildProcesses& processes, int place, int member) {
    auto all = variables_of(place);
    all.push_back(printed.variable());
    all.push_back("LOCKSTEP_ELASTIC_MEMBER=" + (elastic ? std::to_string(member) : ""));  // else another launcher's
    all.push_back("LOCKSTEP_ELASTIC_MIN=" + std::to_string(flags.fewest));
    processes.start(words, all);
  };
  std::optional<ChildProcesses> processes;
  comm::ElasticLaunch::Limits limits;
  limits.until_first_beat = comm::rendezvous_timeout_in(std::getenv).value_or(limits.until_first_beat);
  if (flags.elastic) {
    options.look = [&] {
      const auto now = elastic->look();
      for (const int member : now.joined) launch_says(format("process %d has joined", member));
      for (const int member : now.dead) {
        launch_says(format("process %d stands still, and is killed", member));
        processes->end(member);
      }
      for (const int member : now.late) {
        launch_says(
            format("process %d has not begun to train within %g s, nor in twice the others' time, and is killed. If "
                   "starting only takes long, raise LOCKSTEP_RENDEZVOUS_TIMEOUT (seconds)",
                   member, limits.until_first_beat.count() * 1e-3));
        processes->end(member);
      }
      const int known = elastic->members();
      const auto places = elastic->successors();
      for (size_t i = 0; i < places.size(); ++i) {
        start(*processes, places[i], known + static_cast<int>(i));
        launch_says(format("process %d starts in the place of rank %d", known + static_cast<int>(i), places[i]));
      }
      return !places.empty();
    };
  }
  processes.emplace(options);  // before the store starts threads
  if (!job.store.store) job.store = comm::host_store("127.0.0.1", 0, {job.key.key(), launch_says});
  if (flags.elastic) {
    elastic.emplace(job.store.store, environment_of(variables_of(0)).job, flags.processes, restarts_of(flags), limits);
  }
  for (int rank = 0; rank < flags.processes; ++rank) start(*processes, rank, rank);
  const auto ending = processes->wait();
  if (elastic && ending.failed && elastic->has_lost() && !elastic->takes_part()) {
    launch_says(
        "a killed process has ended this job, since its program takes no part in --elastic; lockstep train does");
  }
  return ending;
}

int launch_command(const LaunchFlags& flags) {
  LaunchedJob job;
  for (int attempt = 0;; ++attempt) {
    const PrintedOnce printed;
    const auto ending = run_once(flags, attempt, printed, job);
    if (!ending.failed || ending.by_request || flags.elastic || attempt == restarts_of(flags)) return ending.code;
    if (printed.would_fail_again()) {
      launch_says("it does not start again, since it would fail in the same way");
      return ending.code;
    }
    launch_says(format("all processes start again, restart %d of %d", attempt + 1, restarts_of(flags)));
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
  app->add_flag("--elastic", flags->elastic,
                "go on without processes that are killed, and start successors that join; the exit code is that of the "
                "job");
  app->add_option("--min-processes", flags->fewest, "an elastic job ends with fewer than N processes (default: 1)")
      ->type_name("N")
      ->check(number_between<int, 1, 1024>);
  app->add_option("--max-restarts", flags->max_restarts,
                  "when a process fails, start all of them again, at most N times; not when a signal asked them to "
                  "end (default: 0); with --elastic: start at most N successors (default: 10)")
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
    check_elastic_launch(*flags);
  });
  return {app, [flags](Output&) { return launch_command(*flags); }};
}

}  // namespace lockstep::cli

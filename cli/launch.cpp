// lockstep launch: starts a program several times on this machine, as ranks of one job.
#include <chrono>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "add_option.hpp"
#include "child_processes.hpp"
#include "comm/job_key.hpp"
#include "comm/meeting/launch_environment.hpp"
#include "comm/meeting/meeting.hpp"
#include "commands.hpp"
#include "flag_checks.hpp"
#include "launched_job.hpp"
#include "output.hpp"
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
    "With --elastic the others compute the step again without a killed process, with\n"
    "the same bits, and a successor joins them: lockstep train --grain N --name NAME.\n"
    "Elastic jobs are of one machine. On several, start lockstep train --grain N\n"
    "--resume auto by torchrun --max-restarts, or by srun or mpirun in a loop. Then\n"
    "all start again from the last checkpoint, and end with the same bits too.\n";

// Has the things of a job that outlive an attempt to run it: its key, and the store. The processes' keys in the store
// have the attempt's number (LaunchEnvironment::job).
struct LaunchedJob {
  const std::string address = comm::loopback_address();
  comm::HandedKey key;
  comm::KeptStore store;
};

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
}

ChildProcesses::Ending run_once(const LaunchFlags& flags, int attempt, LaunchedJob& job, LaunchMessages& messages) {
  ChildProcesses::Options options{.label = flags.label, .until_term_when_stopped = std::chrono::seconds(flags.grace)};
  const auto variables_of = [&](int rank) {
    return variables(flags, {job.address, job.store.port, job.key.file()}, attempt, rank);
  };
  options.on_end = [&](int rank, const ChildProcesses::Options::End& end) {
    comm::announce_end(job.store.store, environment_of(variables_of(rank)), {end.failed, end.stopped, end.how});
    return false;
  };
  ChildProcesses processes(options, messages);  // made before the store starts threads
  if (!job.store.store)
    job.store = comm::host_store(job.address, 0, {job.key.key(), [&](const std::string& text) { messages.say(text); }});
  const auto words = program_words(flags);
  for (int rank = 0; rank < flags.processes; ++rank) processes.start(words, variables_of(rank), rank);
  return processes.wait();
}

// Tells whether a command of lockstep has ended in a way that would come again.
bool would_fail_again(const LaunchFlags& flags, int code) {
  const bool is_lockstep = std::filesystem::path(flags.words[0]).filename() == "lockstep";
  return is_lockstep && (code == kWrongUsage || code == kNotFinite);
}

int launch_command(const LaunchFlags& flags) {
  LaunchMessages messages;
  if (flags.elastic) return launch_elastic(flags, messages).code;
  LaunchedJob job;
  for (int attempt = 0;; ++attempt) {
    const auto ending = run_once(flags, attempt, job, messages);
    const bool restarts = ending.failed && !ending.by_request && attempt < flags.restarts();
    const bool is_in_vain = restarts && would_fail_again(flags, ending.code);
    if (!restarts || is_in_vain) {
      if (is_in_vain) messages.say("it does not start again, since it would fail in the same way");
      if (!ending.first_failure.empty()) messages.say("the job failed: " + ending.first_failure);
      return ending.code;
    }
    messages.say(format("all processes start again, restart %d of %d", attempt + 1, flags.restarts()));
  }
}

}  // namespace

Command add_launch(CLI::App& program) {
  CLI::App* const app =
      program.add_subcommand("launch", "Start a program several times on this machine, as ranks of one job.");
  app->footer(launch_examples);
  app->prefix_command();  // words after the program belong to the program
  const auto flags = std::make_shared<LaunchFlags>();
  const OptionAdder add{*app};
  add("-n,--processes", flags->processes, "N", "how many processes to start")
      ->required()
      ->check(number_between<int, 1, 1024>);
  add("--threads", flags->threads, "N",
      "OMP_NUM_THREADS of each process (default: as it is set, or else 1 if there are several)")
      ->check(number_between<int, 1, 1024>);
  app->add_flag("--label", flags->label, "put the rank before every line of output: [1]");
  app->add_flag("--elastic", flags->elastic,
                "go on without processes that are killed, and start successors that join; the exit code is that of the "
                "job");
  add("--min-processes", flags->fewest, "N", "an elastic job ends with fewer than N processes (default: 1)")
      ->check(number_between<int, 1, 1024>);
  add("--max-restarts", flags->max_restarts, "N",
      "when a process fails, start all of them again, at most N times; not when a signal asked them to end (default: "
      "0); with --elastic: start at most N successors (default: 10)")
      ->check(number_between<int, 0>);
  add("--grace", flags->grace, "SECONDS",
      "how long processes may go on once they were asked to end, to write a checkpoint, before they are ended "
      "(default: 30, as long as SLURM waits before it kills)")
      ->check(number_between<int, 0, 1'000'000>);
  app->callback([flags, app] {
    flags->words = app->remaining();
    check_words(flags->words);
    check_elastic_launch(*flags);
  });
  return {app, [flags](Output&) { return launch_command(*flags); }};
}

}  // namespace lockstep::cli

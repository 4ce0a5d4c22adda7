#include "runs.hpp"

#include <malloc.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <torch/torch.h>
#include <unistd.h>

#include "training.hpp"

#include <array>
#include <cstdio>
#include <filesystem>
#include <stdexcept>

namespace lockstep::simulation {
namespace {

constexpr unsigned kRealSeconds = 20;  // limit of a run, which takes some milliseconds

// A child's message to its parent about a run, in memory that both have.
struct Told {
  Reference found;
  uint64_t trace;
  int64_t points;
  Time time, longest_end;
  bool ended_early;
  double seconds;  // seconds of the processor
  bool done;
  std::array<char, 8'192> wrongs;
};

using Shared = std::array<Told, Runs::kBatch>;

Shared& shared() {
  static auto* const memory =
      static_cast<Shared*>(mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  return *memory;
}

void tell(const Report& report, Told& to) {
  to.found = report.found;
  to.trace = report.trace;
  to.points = report.points;
  to.time = report.time;
  to.longest_end = report.longest_end;
  to.ended_early = report.ended_early;
  std::string text;
  for (const auto& wrong : report.wrongs) text += "  " + wrong + "\n";
  std::snprintf(to.wrongs.data(), to.wrongs.size(), "%s", text.c_str());
  to.done = true;
}

Result result_of(const Told& told) {
  const std::string wrong = told.done ? told.wrongs.data() : "  the program crashed, or took too long\n";
  return {wrong, told.trace, told.points, told.time, told.longest_end, told.ended_early, told.seconds};
}

// Only one thread runs at a time; on another core it would have to be woken by an interrupt.
void stay_on_this_core() {
  cpu_set_t core;
  CPU_ZERO(&core);
  CPU_SET(sched_getcpu(), &core);
  sched_setaffinity(0, sizeof(core), &core);
}

void empty(const std::filesystem::path& folder) {
  for (const auto& entry : std::filesystem::directory_iterator(folder)) std::filesystem::remove_all(entry);
}

// Memory is a faster disk. What a real one loses, Disk simulates.
std::filesystem::path fast_folder() {
  return access("/dev/shm", W_OK) == 0 ? "/dev/shm" : std::filesystem::temp_directory_path();
}

double processor_seconds() {
  timespec time{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

// LibTorch makes much at its first use, which the children then need not.
void warm_up() {
  torch::set_num_threads(1);
  const auto x = torch::ones({2, 2}, torch::requires_grad());
  torch::mse_loss(torch::relu(torch::addmm(x[0], x, x)), x).backward();
  training_set();
}

}  // namespace

Runs::Runs() : folder_(fast_folder()) {
  mallopt(M_ARENA_MAX, 1);  // only one thread runs
  warm_up();
  for (const Plan& plan : undisturbed()) {
    run_in_child({plan}, false);
    const Told& told = shared()[0];
    if (const Result result = result_of(told); !result.wrong.empty()) {
      throw std::runtime_error("an undisturbed run went wrong (" + plan.text() + "):\n" + result.wrong);
    }
    references_[world_of(plan)] = told.found;
  }
}

Runs::World Runs::world_of(const Plan& plan) {
  return {plan.program, plan.processes, plan.ranks_per_process};
}

const Reference* Runs::reference_of(const Plan& plan) const {
  const auto found = references_.find(world_of(plan));
  return found == references_.end() ? nullptr : &found->second;
}

bool Runs::run_in_child(const std::vector<Plan>& plans, bool with_log) const {
  for (size_t i = 0; i < plans.size(); ++i) shared()[i] = {};
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    stay_on_this_core();
    for (size_t i = 0; i < plans.size(); ++i) {
      alarm(kRealSeconds);
      const double begin = processor_seconds();
      const Report report = simulate(plans[i], reference_of(plans[i]), folder_.path(), with_log);
      shared()[i].seconds = processor_seconds() - begin;
      tell(report, shared()[i]);
      empty(folder_.path());
    }
    std::fflush(nullptr);
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  empty(folder_.path());
  return WIFSIGNALED(status) && WTERMSIG(status) != SIGALRM;
}

Result Runs::run(const Plan& plan, bool with_log) const {
  run_in_child({plan}, with_log);
  return result_of(shared()[0]);
}

std::vector<Result> Runs::run_all(const std::vector<Plan>& plans) const {
  const bool crashed = run_in_child(plans, false);
  std::vector<Result> results;
  size_t done = 0;
  for (size_t i = 0; i < plans.size(); ++i) {
    results.push_back(result_of(shared()[i]));
    if (shared()[i].done) ++done;
  }
  for (size_t i = 0; i < plans.size(); ++i) {
    if (!results[i].wrong.empty()) results[i] = run(plans[i]);
  }
  // The effect of a wrong access to memory depends on what was there before.
  if (crashed && done < results.size() && results[done].wrong.empty())
    results[done].wrong = "  the program crashed behind other runs, not alone\n";
  return results;
}

}  // namespace lockstep::simulation

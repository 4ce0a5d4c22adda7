#include "runs.hpp"

#include <sys/mman.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include "training.hpp"

#include <array>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <stdexcept>

namespace lockstep::simulation {
namespace {

constexpr unsigned kRealSeconds = 20;  // that a run may take; it takes some milliseconds

// What a child tells its parent, in memory that both have.
struct Shared {
  Reference found;
  uint64_t trace;
  int64_t points;
  Time time, longest_end;
  bool ended_early;
  bool done;
  std::array<char, 8'192> wrongs;
};

Shared& shared() {
  static auto* const memory =
      static_cast<Shared*>(mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  return *memory;
}

void run_here(const Plan& plan, const Reference* reference, const std::filesystem::path& folder, bool with_log) {
  const Report report = simulate(plan, reference, folder, with_log);
  Shared& to = shared();
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

// LibTorch makes much at its first use, which the children then need not.
void warm_up() {
  torch::set_num_threads(1);
  const auto x = torch::ones({2, 2}, torch::requires_grad());
  torch::mse_loss(torch::relu(torch::addmm(x[0], x, x)), x).backward();
  training_set();
}

}  // namespace

Runs::Runs() {
  warm_up();
  for (const auto& [processes, ranks] : kWorlds) {
    const std::string wrong = run_in_child(undisturbed(processes, ranks), nullptr, false);
    if (!wrong.empty()) {
      throw std::runtime_error("an undisturbed run of " + std::to_string(processes) + " processes with " +
                               std::to_string(ranks) + " ranks each went wrong:\n" + wrong);
    }
    references_[{processes, ranks}] = shared().found;
  }
}

// Gives what went wrong, or "".
std::string Runs::run_in_child(const Plan& plan, const Reference* reference, bool with_log) const {
  shared() = {};
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    alarm(kRealSeconds);
    run_here(plan, reference, folder_.path(), with_log);
    std::fflush(nullptr);
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  for (const auto& entry : std::filesystem::directory_iterator(folder_.path())) std::filesystem::remove_all(entry);
  if (shared().done) return shared().wrongs.data();
  if (WIFSIGNALED(status) && WTERMSIG(status) == SIGALRM) {
    return "  it took more than " + std::to_string(kRealSeconds) + " real seconds\n";
  }
  return "  the program ended by itself: " + std::string(WIFSIGNALED(status) ? strsignal(WTERMSIG(status)) : "exit") +
         "\n";
}

Result Runs::run(uint64_t seed, bool with_log) const {
  const Plan plan = plan_of(seed);
  const Reference& reference = references_.at({plan.processes, plan.ranks_per_process});
  const std::string wrong = run_in_child(plan, &reference, with_log);
  const Shared& from = shared();
  return {wrong, from.trace, from.points, from.time, from.longest_end, from.ended_early};
}

}  // namespace lockstep::simulation

// lockstep_sim: runs simulated jobs, and says which went wrong (docs/simulation.md).
#include "runs.hpp"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

namespace {

using namespace lockstep::simulation;

struct Options {
  uint64_t first = 1, last = 0;
  bool replay = false, verbose = false;
  std::string kind = {};  // the runs' kind
};

[[noreturn]] void explain_usage() {
  std::printf(
      "lockstep_sim --seed N                   runs one simulated job, with a log of all that happens\n"
      "lockstep_sim --seeds A..B [--verbose] [--only KIND]\n"
      "                                        runs many, and names the seeds that went wrong. KIND is\n"
      "                                        %s\n",
      kKinds);
  std::exit(2);
}

Options read(int argc, char** argv) {
  Options options;
  if (argc < 3) explain_usage();
  const std::string flag = argv[1], value = argv[2];
  const size_t dots = value.find("..");
  options.first = std::strtoull(value.c_str(), nullptr, 10);
  options.last = options.first;
  options.replay = flag == "--seed";
  if (flag == "--seeds" && dots != std::string::npos) {
    options.last = std::strtoull(value.c_str() + dots + 2, nullptr, 10);
  } else if (!options.replay) {
    explain_usage();
  }
  options.verbose = options.replay;
  for (int i = 3; i < argc; ++i) {
    if (argv[i] == std::string("--verbose")) {
      options.verbose = true;
    } else if (argv[i] == std::string("--only") && i + 1 < argc) {
      options.kind = argv[++i];
    } else {
      explain_usage();
    }
  }
  return options;
}

double seconds_of(Time time) {
  return 1e-9 * static_cast<double>(time);
}

void tell(const Plan& plan, const Result& result, bool verbose) {
  const std::string text = plan.text();
  if (!result.wrong.empty())
    std::printf("seed %lu went wrong (%s):\n%s", plan.seed, text.c_str(), result.wrong.c_str());
  if (!verbose) return;
  std::printf("seed %lu: %s; %s, %.3f s and %ld points; the last end %.3f s after the fault; %.1f ms; trace %016lx\n",
              plan.seed, text.c_str(), result.ended_early ? "ended with an error" : "ended well",
              seconds_of(result.time), result.points, seconds_of(result.longest_end), 1000 * result.seconds,
              result.trace);
}

}  // namespace

int main(int argc, char** argv) try {
  const Options options = read(argc, argv);
  const Runs runs;
  const auto start = std::chrono::steady_clock::now();
  uint64_t wrong = 0, early = 0, count = 0;
  double worked = 0;
  for (uint64_t seed = options.first; seed <= options.last;) {
    std::vector<Plan> plans;
    for (; seed <= options.last && plans.size() < Runs::kBatch; ++seed) {
      const Plan plan = plan_of(seed);
      if (options.kind.empty() || plan.is_of(options.kind)) plans.push_back(plan);
    }
    if (plans.empty()) break;
    count += plans.size();
    if (options.replay) std::printf("seed %lu: %s\n", plans[0].seed, plans[0].text().c_str());
    const auto results = options.replay ? std::vector{runs.run(plans[0], true)} : runs.run_all(plans);
    for (size_t i = 0; i < results.size(); ++i) {
      tell(plans[i], results[i], options.verbose);
      early += results[i].ended_early ? 1 : 0;
      wrong += results[i].wrong.empty() ? 0 : 1;
      worked += results[i].seconds;
    }
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  std::printf("%lu runs, %lu ended with an error, %lu went wrong; %.1f runs a second, and %.1f a second of a core\n",
              count, early, wrong, static_cast<double>(count) / seconds, static_cast<double>(count) / worked);
  return wrong == 0 ? 0 : 1;
} catch (const std::exception& error) {
  std::printf("lockstep_sim: %s\n", error.what());
  return 1;
}

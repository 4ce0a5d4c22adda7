// lockstep_sim_planted: plants one bug after the other, and says by which seed it was found. Fails if one was not.
#include "planted.hpp"
#include "runs.hpp"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <iterator>
#include <string>

namespace {

int bug_that_is_on = 0;

constexpr const char* kBugs[] = {
#include "planted_bugs.inc"
};

}  // namespace

namespace lockstep::simulation {

bool planted(int bug) {
  return bug == bug_that_is_on;
}

void plant(int bug) {
  bug_that_is_on = bug;
}

}  // namespace lockstep::simulation

int main(int argc, char** argv) try {
  using namespace lockstep::simulation;
  const uint64_t most = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 2'000;
  const int only = argc > 2 ? std::atoi(argv[2]) : 0;
  const Runs runs;  // the references have no bug
  int missed = 0;
  for (int bug = 1; bug <= static_cast<int>(std::size(kBugs)); ++bug) {
    if (only != 0 && bug != only) continue;
    plant(bug);
    uint64_t seed = 0;
    std::string wrong;
    while (wrong.empty() && seed < most) {
      const auto results = runs.run_all(seed + 1, std::min(most, seed + 8));
      for (size_t i = 0; i < results.size() && wrong.empty(); ++i, ++seed) wrong = results[i].wrong;
    }
    if (wrong.empty()) ++missed;
    std::printf("bug %2d, %s: %s %lu\n%s", bug, kBugs[bug - 1],
                wrong.empty() ? "MISSED by all seeds to" : "found by seed", seed, wrong.c_str());
    std::fflush(stdout);
  }
  return missed == 0 ? 0 : 1;
} catch (const std::exception& error) {
  std::printf("lockstep_sim_planted: %s\n", error.what());
  return 1;
}

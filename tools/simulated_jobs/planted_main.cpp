// lockstep_sim_planted: plants one bug after the other, and says by which seed it was found. Fails if one was not.
//
// A bug that one kind of run alone can find is looked for in such runs. `others` looks for these bugs in all other
// runs instead, and fails if one is found. A number behind it means one bug alone.
#include "planted.hpp"
#include "runs.hpp"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <iterator>
#include <string>
#include <vector>

namespace {

int bug_that_is_on = 0;

struct Bug {
  const char* what;
  const char* kind;  // kind of the runs that find it; "": any
};

constexpr Bug kBugs[] = {
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
  const uint64_t most = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 2'000;  // runs
  const bool others = argc > 2 && argv[2] == std::string("others");
  const int number_at = others ? 3 : 2, only = argc > number_at ? std::atoi(argv[number_at]) : 0;
  const Runs runs;  // the references have no bug
  int failures = 0;
  for (int bug = 1; bug <= static_cast<int>(std::size(kBugs)); ++bug) {
    const auto& [what, kind] = kBugs[bug - 1];
    if ((only != 0 && bug != only) || (others && std::string(kind).empty())) continue;
    plant(bug);
    uint64_t seed = 0, tried = 0;
    const Plan* found = nullptr;
    std::string wrong;
    std::vector<Plan> plans;
    for (; found == nullptr && tried < most; tried += plans.size()) {
      for (plans.clear(); plans.size() < std::min<uint64_t>(8, most - tried);) {
        const Plan plan = plan_of(++seed);
        if ((std::string(kind).empty() || plan.is_of(kind)) != others) plans.push_back(plan);
      }
      const auto results = runs.run_all(plans);
      for (size_t i = 0; i < results.size() && found == nullptr; ++i) {
        if (results[i].wrong.empty()) continue;
        found = &plans[i];
        wrong = results[i].wrong;
      }
    }
    failures += (found == nullptr) == others ? 0 : 1;
    const std::string how = found == nullptr ? "MISSED by " + std::to_string(tried) + " runs"
                                             : "found by seed " + std::to_string(found->seed);
    std::printf("bug %2d, %s: %s%s%s\n", bug, what, how.c_str(), found == nullptr ? "" : ": ",
                found == nullptr ? "" : found->text().c_str());
    std::printf("%s", wrong.c_str());
    std::fflush(stdout);
  }
  return failures == 0 ? 0 : 1;
} catch (const std::exception& error) {
  std::printf("lockstep_sim_planted: %s\n", error.what());
  return 1;
}

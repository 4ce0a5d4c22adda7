#include "guilt.hpp"

#include <algorithm>

namespace lockstep::simulation {
namespace {

using Strikes = std::vector<Strike>;

// If two were struck before they came to run().
std::string both_missing(const Course& course) {
  std::string numbers;
  const int count = std::min(course.plan.processes, static_cast<int>(course.outcomes.size()));
  for (int process = 0; process < count; ++process) {
    if (is_faulty(course, process)) numbers += (numbers.empty() ? "" : ", ") + std::to_string(process);
  }
  return "waited 20 s for processes " + numbers + ", which did not come";
}

// Whoever could not write, in its own words and in those of a launcher.
Texts names_of_writers(const Course& course) {
  Texts names{"rank 0 (cpu): cannot write", "rank 0 (cpu): cannot make the folder"};
  for (int process = 0; process < static_cast<int>(course.outcomes.size()); ++process) {
    if (course.outcomes[process].text.find("rank 0 (cpu): cannot ") != std::string::npos)
      names.push_back(name(process) + " of the job is gone: it ended with exit code 1");
  }
  return names;
}

bool any_says(const Course& course, const std::string& words) {
  return std::any_of(course.outcomes.begin(), course.outcomes.end(),
                     [&](const Outcome& outcome) { return outcome.text.find(words) != outcome.text.npos; });
}

std::vector<const Past*> begun_generations(const Course& course) {
  std::vector<const Past*> begun;
  for (const auto& generation : course.generations) {
    if (generation.has_begun) begun.push_back(&generation);
  }
  return begun;
}

// Whether it is in the last generation that anybody is in.
bool is_in_last(const Course& course, int member) {
  const auto last = std::find_if(course.generations.rbegin(), course.generations.rend(),
                                 [](const Past& generation) { return !generation.members.empty(); });
  if (last == course.generations.rend()) return false;
  return std::find(last->members.begin(), last->members.end(), member) != last->members.end();
}

}  // namespace

std::string name(int process) {
  return "process " + std::to_string(process);
}

Strikes happened(const Course& course) {
  Strikes all;
  for (size_t i = 0; i < course.times.size(); ++i) {
    if (course.times[i] != kNever) all.push_back(course.plan.strikes[i]);
  }
  return all;
}

bool has(const Strikes& strikes, Fault fault) {
  return std::any_of(strikes.begin(), strikes.end(), [&](const Strike& strike) { return strike.fault == fault; });
}

bool is_faulty(const Course& course, int process) {
  if (course.plan.is_elastic() && !course.outcomes[process].was_started) return true;
  const Strikes strikes = happened(course);
  return std::any_of(strikes.begin(), strikes.end(), [&](const Strike& strike) {
    if (strike.fault == Fault::kill_host) return !course.plan.launcher && process == 0;
    return process == strike.victim && (strike.fault == Fault::kill || strike.fault == Fault::stop);
  });
}

Texts names_of_the_guilty(const Strike& strike, const Course& course) {
  const int first = strike.victim * course.plan.ranks_per_process;
  const std::string rank = "rank " + std::to_string(first) + " (cpu)";
  const std::string all =
      course.plan.ranks_per_process == 1
          ? rank
          : "ranks " + std::to_string(first) + " to " + std::to_string(first + course.plan.ranks_per_process - 1);
  const std::string before = name(strike.victim) + " of " + std::to_string(course.plan.processes);
  const std::string missing =  // by its number in the generation
      "waited 20 s for process " + (course.plan.is_elastic() ? "" : std::to_string(strike.victim));
  const bool is_host = !course.plan.launcher && strike.victim == 0;
  switch (strike.fault) {
    case Fault::kill:
      if (is_host) {
        return {rank,
                all,
                course.host + " is gone",
                "rank 0 is gone",
                before,
                "rank 0's process should keep",
                "process of rank 0 keeps"};
      }
      return {"the process of " + all + " is gone", before + " is gone", before + " did not come to run()", missing,
              both_missing(course)};
    case Fault::kill_host:
      return {course.host + " is gone", "the process of rank 0 is gone", "the process of ranks 0 to 1 is gone",
              "rank 0 keeps",           "the launcher is gone",          "the launcher keeps",
              "nothing answers"};
    case Fault::stop:
      if (is_host) {
        return {rank,
                all,
                course.host + " is gone",
                "rank 0 is gone",
                before,
                "rank 0 keeps",
                "the launcher keeps",
                "nothing answers"};
      }
      return {"the process of " + all + " is gone", before + " is gone", missing, both_missing(course),
              "is gone: the store"};
    case Fault::throws:  // it may be another rank, in a later generation
      if (course.plan.is_elastic())
        return {"thrown by the test", name(strike.victim) + " of the job is gone: it ended"};
      return {rank + ": thrown by the test"};
    case Fault::full_disk:
      return names_of_writers(course);
    case Fault::differs:
      return {"the ranks' calls differ", rank + " waits in barrier"};
    case Fault::unanswered:
      return {rank};
    case Fault::leaves:
      return {rank + " returned without", rank + " and ", rank + ", which has returned"};
    case Fault::cut:
      if (course.plan.is_elastic()) return {"rank", "gone", "waited 20 s for process"};  // one that joins does, too
      return {name(strike.victim), name(strike.other), "rank", "gone"};
    default:
      return {};
  }
}

bool is_done(const Outcome& outcome) {
  return std::all_of(outcome.ranks.begin(), outcome.ranks.end(),
                     [](const Steps& steps) { return steps.weights.size() == kSteps; });
}

bool store_is_gone(const Course& course) {
  const Strikes strikes = happened(course);
  return std::any_of(strikes.begin(), strikes.end(), [&](const Strike& strike) {
    const bool of_victim = strike.fault == Fault::kill || strike.fault == Fault::stop;
    return strike.fault == Fault::kill_host || strike.fault == Fault::cut ||
           (of_victim && !course.plan.launcher && strike.victim == 0);
  });
}

bool lost_all(const Course& course) {
  const auto begun = begun_generations(course);
  if (begun.empty() || !any_says(course, kLostAll)) return false;
  const auto& had = begun.back()->members;
  return std::none_of(had.begin(), had.end(), [&](int member) { return is_in_last(course, member); });
}

bool is_nobody_left(const Course& course) {
  return std::any_of(course.generations.begin(), course.generations.end(),
                     [](const Past& generation) { return generation.members.empty(); });
}

bool must_end_well(const Course& course) {
  if (lost_all(course) || is_nobody_left(course)) return false;
  const Strikes strikes = happened(course);
  return std::all_of(strikes.begin(), strikes.end(), [&](const Strike& strike) {
    const bool is_loss = course.plan.is_elastic() && (strike.fault == Fault::kill || strike.fault == Fault::stop);
    return strike.is_harmless() || is_loss;
  });
}

}  // namespace lockstep::simulation

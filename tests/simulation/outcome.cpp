#include "outcome.hpp"

#include <algorithm>
#include <map>

namespace lockstep::simulation {
namespace {

using Texts = std::vector<std::string>;

std::string name(int process) {
  return "process " + std::to_string(process);
}

bool is_faulty(const Course& course, int process) {
  const Fault fault = course.plan.fault;
  if (!course.happened) return false;
  if (fault == Fault::kill_host) return !course.plan.launcher && process == 0;
  return process == course.plan.victim && (fault == Fault::kill || fault == Fault::stop);
}

// The words by which an error may name the one at fault.
Texts names_of_the_guilty(const Course& course) {
  const int first = course.plan.victim * course.plan.ranks_per_process;
  const std::string rank = "rank " + std::to_string(first) + " (cpu)";
  const std::string all =
      course.plan.ranks_per_process == 1
          ? rank
          : "ranks " + std::to_string(first) + " to " + std::to_string(first + course.plan.ranks_per_process - 1);
  const std::string before = name(course.plan.victim) + " of " + std::to_string(course.plan.processes);
  const std::string missing = "waited 20 s for process " + std::to_string(course.plan.victim);
  switch (course.plan.fault) {
    case Fault::kill:
      if (!course.plan.launcher && course.plan.victim == 0)
        return {rank,
                all,
                course.host + " is gone",
                "rank 0 is gone",
                before,
                "rank 0's process should keep",
                "process of rank 0 keeps"};
      return {"the process of " + all + " is gone", before + " is gone", before + " did not come to run()", missing};
    case Fault::kill_host:
      return {course.host + " is gone",
              "the process of rank 0 is gone",
              "the process of ranks 0 to 1 is gone",
              "rank 0 keeps",
              "the launcher keeps",
              "nothing answers"};
    case Fault::stop:
      if (!course.plan.launcher && course.plan.victim == 0)
        return {rank,
                all,
                course.host + " is gone",
                "rank 0 is gone",
                before,
                "rank 0 keeps",
                "the launcher keeps",
                "nothing answers"};
      return {"the process of " + all + " is gone", before + " is gone", missing, "is gone: the store"};
    case Fault::throws:
      return {rank + ": thrown by the test"};
    case Fault::full_disk:
      return {"rank 0 (cpu): cannot write", "rank 0 (cpu): cannot make the folder"};
    case Fault::differs:
      return {"the ranks' calls differ", rank + " waits in barrier"};
    case Fault::unanswered:
      return {rank};
    case Fault::leaves:
      return {rank + " returned without", rank + " and ", rank + ", which has returned"};
    default:  // the two sides of a cut
      return {name(course.plan.victim), name(course.plan.other), "rank", "gone"};
  }
}

void check_results(const Course& course, const Reference* reference, Texts& wrongs) {
  for (int process = 0; process < static_cast<int>(course.outcomes.size()); ++process) {
    const Outcome& outcome = course.outcomes[process];
    for (const auto& steps : outcome.ranks) {
      if (outcome.over && outcome.text.empty() && steps.weights.size() != kSteps) {
        wrongs.push_back(name(process) + " ended well after " + std::to_string(steps.weights.size()) + " steps");
      }
      for (size_t step = 0; reference != nullptr && step < steps.weights.size(); ++step) {
        if (steps.weights[step] == reference->weights[step]) continue;
        wrongs.push_back(name(process) + " has other weights after step " + std::to_string(step));
        break;
      }
    }
  }
}

// In each step that all ranks completed, no sample counts twice, and over all steps none is left out.
void check_samples(const Course& course, Texts& wrongs) {
  std::map<int64_t, int> times;
  size_t complete = kSteps;
  for (const auto& outcome : course.outcomes) {
    for (const auto& steps : outcome.ranks) complete = std::min(complete, steps.samples.size());
  }
  for (const auto& outcome : course.outcomes) {
    for (const auto& steps : outcome.ranks) {
      for (size_t step = 0; step < complete; ++step) {
        for (const int64_t sample : steps.samples[step]) ++times[sample];
      }
    }
  }
  if (times.size() != complete * kBatch) wrongs.push_back("samples were left out, or counted twice");
}

// Whether the process can have been in a run that is over for the others, too.
bool is_done(const Outcome& outcome) {
  return std::all_of(outcome.ranks.begin(), outcome.ranks.end(),
                     [](const Steps& steps) { return steps.weights.size() == kSteps; });
}

bool store_is_gone(const Course& course) {
  const bool of_victim = course.plan.fault == Fault::kill || course.plan.fault == Fault::stop;
  return course.plan.fault == Fault::kill_host || course.plan.fault == Fault::cut ||
         (of_victim && !course.plan.launcher && course.plan.victim == 0);
}

void check_errors(const Course& course, Texts& wrongs) {
  const bool harmless = !course.happened || course.plan.is_harmless();
  const Texts names = names_of_the_guilty(course);
  const std::string* first = nullptr;  // error of a process that is not at fault
  bool any_well = false;
  for (int process = 0; process < static_cast<int>(course.outcomes.size()); ++process) {
    const Outcome& outcome = course.outcomes[process];
    if (!outcome.over) continue;
    if (harmless && !outcome.text.empty()) wrongs.push_back(name(process) + " failed: " + outcome.text);
    if (harmless || is_faulty(course, process)) continue;
    any_well |= outcome.text.empty();
    if (outcome.text.empty()) continue;
    const auto is_named = [&](const std::string& named) { return outcome.text.find(named) != outcome.text.npos; };
    if (std::none_of(names.begin(), names.end(), is_named)) {
      wrongs.push_back(name(process) + " names another one: " + outcome.text);
    }
    if (first != nullptr && *first != outcome.text && !store_is_gone(course)) {
      wrongs.push_back("two processes say other things: " + *first + " | " + outcome.text);
    }
    first = &outcome.text;
  }
  // Who hears that all are done, and whom the store's end keeps from hearing it, nobody can agree on.
  const bool all_done = std::all_of(course.outcomes.begin(), course.outcomes.end(), is_done);
  if (first != nullptr && any_well && !(all_done && store_is_gone(course)))
    wrongs.push_back("some processes ended well, others did not: " + *first);
  const bool must_fail = course.plan.fault == Fault::throws || course.plan.fault == Fault::leaves ||
                         course.plan.fault == Fault::differs || course.plan.fault == Fault::unanswered;
  if (course.happened && must_fail && any_well) wrongs.push_back("a process ended well in spite of the fault");
  const bool lacks_one = course.plan.fault == Fault::kill && !is_done(course.outcomes[course.plan.victim]);
  if (course.happened && lacks_one && any_well) wrongs.push_back("a process ended well although one was killed before");
}

// From the newest checkpoint a run goes on, with the weights that it had then.
void check_checkpoint(const Course& course, const Reference* reference, Texts& wrongs) {
  if (!course.unreadable.empty()) wrongs.push_back("no checkpoint can be read: " + course.unreadable);
  if (course.found < course.saved) {
    wrongs.push_back("the newest checkpoint is of step " + std::to_string(course.found) + ", but one of step " +
                     std::to_string(course.saved) + " was written");
  }
  if (course.found > 0 && reference != nullptr && course.found_weights != reference->weights[course.found - 1]) {
    wrongs.push_back("the checkpoint of step " + std::to_string(course.found) + " has other weights");
  }
}

// How long after the fault the others may take. Without a launcher a process that does not come is waited for, as is
// the store that it should keep.
Time allowed(const Course& course) {
  for (const auto& outcome : course.outcomes) {
    for (const char* const waited : {"did not come to run()", "but nothing answers"}) {
      if (outcome.text.find(waited) != std::string::npos) return 22 * kSecond;
    }
  }
  switch (course.plan.fault) {
    case Fault::kill:
      return (course.plan.launcher ? 3 : 12) * kSecond;
    case Fault::throws:
    case Fault::full_disk:
    case Fault::leaves:
    case Fault::differs:
    case Fault::unanswered:
      return 4 * kSecond;
    case Fault::kill_host:
      return 12 * kSecond;
    default:
      return 45 * kSecond;
  }
}

}  // namespace

Time longest_end(const Course& course) {
  Time longest = 0;
  for (int process = 0; process < static_cast<int>(course.outcomes.size()); ++process) {
    const Outcome& outcome = course.outcomes[process];
    if (outcome.over && !outcome.text.empty() && !is_faulty(course, process))
      longest = std::max(longest, outcome.end - course.fault);
  }
  return longest;
}

std::vector<std::string> wrongs_of(const Course& course, const Reference* reference) {
  Texts wrongs;
  if (!course.left.empty()) wrongs.push_back("these could not go on, or not in time: " + course.left);
  check_results(course, reference, wrongs);
  check_samples(course, wrongs);
  check_errors(course, wrongs);
  check_checkpoint(course, reference, wrongs);
  if (const Time longest = longest_end(course); course.happened && longest > allowed(course)) {
    wrongs.push_back("the last process ended " + std::to_string(longest / kMillisecond) + " ms after the fault");
  }
  for (int process = 0; process < static_cast<int>(course.outcomes.size()); ++process) {
    const Outcome& outcome = course.outcomes[process];
    if (outcome.over && outcome.text.empty() && outcome.threads_left > 0) {
      wrongs.push_back(name(process) + " left " + std::to_string(outcome.threads_left) + " threads behind");
    }
  }
  return wrongs;
}

}  // namespace lockstep::simulation

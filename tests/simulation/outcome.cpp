#include "outcome.hpp"

#include <algorithm>
#include <map>
#include <set>

namespace lockstep::simulation {
namespace {

using Texts = std::vector<std::string>;

const std::string kLostState = "two neighbours among the job's ranks are gone";

std::string name(int process) {
  return "process " + std::to_string(process);
}

using Strikes = std::vector<Strike>;

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
  const Strikes strikes = happened(course);
  return std::any_of(strikes.begin(), strikes.end(), [&](const Strike& strike) {
    if (strike.fault == Fault::kill_host) return !course.plan.launcher && process == 0;
    return process == strike.victim && (strike.fault == Fault::kill || strike.fault == Fault::stop);
  });
}

// If two were struck before they came to run().
std::string both_missing(const Course& course) {
  std::string numbers;
  for (int process = 0; process < course.plan.processes; ++process) {
    if (is_faulty(course, process)) numbers += (numbers.empty() ? "" : ", ") + std::to_string(process);
  }
  return "waited 20 s for processes " + numbers + ", which did not come";
}

// The words by which an error may name the one at fault.
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
    case Fault::throws:  // as another rank, in a later generation
      if (course.plan.is_elastic())
        return {"thrown by the test", name(strike.victim) + " of the job is gone: it ended"};
      return {rank + ": thrown by the test", "every worker failed"};
    case Fault::full_disk:
      return {"rank 0 (cpu): cannot write", "rank 0 (cpu): cannot make the folder"};
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

void check_results(const Course& course, const Reference* reference, Texts& wrongs) {
  for (int process = 0; process < static_cast<int>(course.outcomes.size()); ++process) {
    const Outcome& outcome = course.outcomes[process];
    for (const auto& steps : outcome.ranks) {
      if (outcome.over && outcome.text.empty() && steps.weights.size() != kSteps && !course.plan.is_elastic()) {
        wrongs.push_back(name(process) + " ended well after " + std::to_string(steps.weights.size()) + " steps");
      }
      for (size_t step = 0; reference != nullptr && step < steps.weights.size(); ++step) {
        if (steps.weights[step] == 0 || steps.weights[step] == reference->weights[step]) continue;
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
  const Strikes strikes = happened(course);
  return std::any_of(strikes.begin(), strikes.end(), [&](const Strike& strike) {
    const bool of_victim = strike.fault == Fault::kill || strike.fault == Fault::stop;
    return strike.fault == Fault::kill_host || strike.fault == Fault::cut ||
           (of_victim && !course.plan.launcher && strike.victim == 0);
  });
}

// A worker that fails while all train is lost, and the others go on. Before, and after, it is needed.
bool is_loss(const Strike& strike, const Course& course) {
  const bool ends = strike.fault == Fault::kill || strike.fault == Fault::stop;
  if (course.plan.is_elastic()) return ends;
  if (!course.plan.is_server() || (strike.victim == 0 && !course.plan.launcher)) return false;
  if (strike.fault == Fault::throws) return true;
  // Whoever has thrown lacks steps for good. So nobody can tell whether it was killed before the others had finished.
  const Strikes strikes = happened(course);
  const bool threw = std::any_of(strikes.begin(), strikes.end(), [&](const Strike& other) {
    return other.fault == Fault::throws && other.victim == strike.victim;
  });
  if (threw) return false;
  const auto steps_of = [&](int process) { return course.outcomes[process].ranks[0].samples.size(); };
  const int workers = course.plan.processes - course.plan.servers;
  for (int worker = 0; worker < workers; ++worker) {
    if (steps_of(worker) == 0) return false;  // it may wait for what the lost one said before
  }
  return ends && strike.victim < workers && steps_of(strike.victim) < kSteps;
}

// Where slices are kept twice, two who kept the same may be lost, if two are lost at all. Two alone have all of them.
bool lost_state(const Course& course) {
  if (course.plan.zero_stage == 0 || course.plan.processes == 2) return false;
  const Strikes strikes = happened(course);
  const auto losses =
      std::count_if(strikes.begin(), strikes.end(), [&](const Strike& strike) { return is_loss(strike, course); });
  return losses == 2 && std::any_of(course.outcomes.begin(), course.outcomes.end(), [](const Outcome& outcome) {
           return outcome.text.find(kLostState) != outcome.text.npos;
         });
}

// Without a fault that ends it the run goes on, as long as any are left to.
bool must_end_well(const Course& course) {
  if (lost_state(course)) return false;
  const Strikes strikes = happened(course);
  std::set<int> lost;
  for (const auto& strike : strikes) {
    if (strike.is_harmless()) continue;
    if (!is_loss(strike, course)) return false;
    lost.insert(strike.victim);
  }
  return !course.plan.is_server() || static_cast<int>(lost.size()) < course.plan.processes - course.plan.servers;
}

// Those who were in the run may add where one of them was. Those who have waited for as long say so at the same time.
bool say_the_same(const std::string& one, const std::string& other) {
  const auto about = [](const std::string& text) {
    const size_t waited = text.find(" waited ");
    return text.starts_with("process ") && waited != text.npos ? text.substr(waited) : text;
  };
  return about(one).starts_with(about(other)) || about(other).starts_with(about(one));
}

void check_errors(const Course& course, Texts& wrongs) {
  const Strikes strikes = happened(course);
  const bool harmless = must_end_well(course);
  Texts names;
  for (const auto& strike : strikes) {
    for (const auto& named : names_of_the_guilty(strike, course)) names.push_back(named);
  }
  if (lost_state(course)) names.push_back(kLostState);
  const std::string* first = nullptr;  // error of a process that is not at fault
  bool any_well = false;
  for (int process = 0; process < static_cast<int>(course.outcomes.size()); ++process) {
    const Outcome& outcome = course.outcomes[process];
    if (!outcome.over || is_faulty(course, process)) continue;
    if (harmless && !outcome.text.empty()) wrongs.push_back(name(process) + " failed: " + outcome.text);
    if (harmless) continue;
    any_well |= outcome.text.empty();
    if (outcome.text.empty()) continue;
    const auto is_named = [&](const std::string& named) { return outcome.text.find(named) != outcome.text.npos; };
    if (std::none_of(names.begin(), names.end(), is_named)) {
      wrongs.push_back(name(process) + " names another one: " + outcome.text);
    }
    const bool may_differ = store_is_gone(course) || course.plan.is_elastic();  // in another generation
    if (first != nullptr && !say_the_same(*first, outcome.text) && !may_differ) {
      wrongs.push_back("two processes say other things: " + *first + " | " + outcome.text);
    }
    first = &outcome.text;
  }
  if (course.plan.is_elastic() || harmless) return;
  // Who hears that all are done, and whom the store's end keeps from hearing it, nobody can agree on.
  const bool all_done = course.plan.is_server() || std::all_of(course.outcomes.begin(), course.outcomes.end(), is_done);
  if (first != nullptr && any_well && !(all_done && store_is_gone(course)))
    wrongs.push_back("some processes ended well, others did not: " + *first);
  if (course.plan.is_server()) return;  // which goes on without workers
  for (const auto& strike : strikes) {
    if (strike.is_by_rank() && any_well) wrongs.push_back("a process ended well in spite of the fault");
    const bool lacks_one = strike.fault == Fault::kill && !is_done(course.outcomes[strike.victim]);
    if (lacks_one && any_well) wrongs.push_back("a process ended well although one was killed before");
  }
}

// Somebody finishes an elastic job as long as one who has its state is left, and the launcher.
void check_elastic(const Course& course, Texts& wrongs) {
  if (!course.plan.is_elastic() || !must_end_well(course)) return;
  int struck = 0;
  for (int process = 0; process < course.plan.processes; ++process) struck += is_faulty(course, process) ? 1 : 0;
  if (struck < course.plan.processes && std::none_of(course.outcomes.begin(), course.outcomes.end(), is_done))
    wrongs.push_back("nobody finished the job");
}

// Each sample counts once; those of a lost worker may count, and are not counted twice.
void check_servers(const Course& course, Texts& wrongs) {
  if (!course.plan.is_server()) return;
  const int workers = course.plan.processes - course.plan.servers;
  const Steps* first = nullptr;
  for (int process = 0; process < course.plan.processes; ++process) {
    const Outcome& outcome = course.outcomes[process];
    const Steps& steps = outcome.ranks[0];
    if (!outcome.over || !outcome.text.empty()) continue;
    if (first != nullptr && (steps.counts != first->counts || steps.lost != first->lost))
      wrongs.push_back(name(process) + " has other counts, or knows of others that were lost");
    first = &steps;
    const bool is_lost = std::find(steps.lost.begin(), steps.lost.end(), process) != steps.lost.end();
    if (process < workers && !is_lost && steps.samples.size() != kSteps)
      wrongs.push_back(name(process) + " ended well after " + std::to_string(steps.samples.size()) + " steps");
  }
  if (first == nullptr) return;
  for (int worker = 0; worker < workers; ++worker) {
    const bool returned = !course.outcomes[worker].ranks[0].counts.empty();
    if (!returned && std::find(first->lost.begin(), first->lost.end(), worker) == first->lost.end())
      wrongs.push_back(name(worker) + " did not come back from train(), and nobody says that it was lost");
  }
  std::vector<int> known(first->counts.size());  // by those who got an answer
  for (const auto& outcome : course.outcomes) {
    for (const auto& samples : outcome.ranks[0].samples) {
      for (const int64_t sample : samples) ++known[sample];
    }
  }
  for (size_t sample = 0; sample < known.size(); ++sample) {
    const int count = first->counts[sample];
    if (count >= known[sample] && count <= 1 && (count == known[sample] || !first->lost.empty())) continue;
    wrongs.push_back("sample " + std::to_string(sample) + " counts " + std::to_string(count) +
                     " times, and was pushed " + std::to_string(known[sample]) + " times");
    return;
  }
  for (const int worker : first->lost) {
    const Strikes strikes = happened(course);
    const bool struck = std::any_of(strikes.begin(), strikes.end(), [&](const Strike& strike) {
      return strike.victim == worker || strike.fault == Fault::cut;
    });
    if (!struck) wrongs.push_back("worker " + std::to_string(worker) + " was lost without a fault");
  }
}

// From the newest checkpoint a run goes on, with the weights that it had then.
void check_checkpoint(const Course& course, const Reference* reference, Texts& wrongs) {
  const bool may_have_none = has(happened(course), Fault::lost_fsync) && course.saved == 0;
  if (!course.unreadable.empty() && !may_have_none) wrongs.push_back("no checkpoint can be read: " + course.unreadable);
  if (course.found < course.saved) {
    wrongs.push_back("the newest checkpoint is of step " + std::to_string(course.found) + ", but one of step " +
                     std::to_string(course.saved) + " was written");
  }
  if (course.found > 0 && reference != nullptr && course.found_weights != reference->weights[course.found - 1]) {
    wrongs.push_back("the checkpoint of step " + std::to_string(course.found) + " has other weights");
  }
}

Time allowed_after(const Strike& strike, const Plan& plan) {
  switch (strike.fault) {
    case Fault::kill:
      return (plan.launcher ? 3 : 12) * kSecond;
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

// How long after the fault the others may take. Without a launcher a process that does not come is waited for, as is
// the store that it should keep.
Time allowed(const Course& course) {
  const Time until_they_came = (course.plan.is_elastic() ? 62 : 22) * kSecond;
  Time longest = 0;
  for (const auto& strike : happened(course)) longest = std::max(longest, allowed_after(strike, course.plan));
  for (const auto& outcome : course.outcomes) {
    for (const char* const waited : {"did not come to run()", "but nothing answers"}) {
      if (outcome.text.find(waited) != std::string::npos) longest = std::max(longest, until_they_came);
    }
  }
  return longest;
}

}  // namespace

Time longest_end(const Course& course) {
  Time fault = 0, longest = 0;
  for (const Time time : course.times) fault = std::max(fault, time == kNever ? 0 : time);
  for (int process = 0; process < static_cast<int>(course.outcomes.size()); ++process) {
    const Outcome& outcome = course.outcomes[process];
    if (outcome.over && (!outcome.text.empty() || course.plan.is_elastic()) && !is_faulty(course, process))
      longest = std::max(longest, outcome.end - fault);
  }
  return longest;
}

std::vector<std::string> wrongs_of(const Course& course, const Reference* reference) {
  Texts wrongs;
  if (!course.left.empty()) wrongs.push_back("these could not go on, or not in time: " + course.left);
  if (!course.plan.is_server()) check_results(course, reference, wrongs);
  if (course.plan.program == Program::data_parallel) check_samples(course, wrongs);
  check_servers(course, wrongs);
  check_errors(course, wrongs);
  check_elastic(course, wrongs);
  check_checkpoint(course, reference, wrongs);
  if (const Time longest = longest_end(course); !happened(course).empty() && longest > allowed(course)) {
    wrongs.push_back("the last process ended " + std::to_string(longest / kMillisecond) + " ms after the fault");
  }
  for (int process = 0; process < static_cast<int>(course.outcomes.size()); ++process) {
    const Outcome& outcome = course.outcomes[process];
    // A generation that breaks while it connects leaves threads in Gloo for as long as that waits.
    const bool may_connect = course.plan.is_elastic() && !happened(course).empty();
    if (outcome.over && outcome.text.empty() && outcome.threads_left > 0 && !may_connect) {
      wrongs.push_back(name(process) + " left " + std::to_string(outcome.threads_left) + " threads behind");
    }
  }
  return wrongs;
}

}  // namespace lockstep::simulation

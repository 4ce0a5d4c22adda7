#include "outcome.hpp"

#include "guilt.hpp"

#include <algorithm>
#include <map>

namespace lockstep::simulation {
namespace {

using Strikes = std::vector<Strike>;

constexpr int kKeysOfMember = 7, kKeysOfGeneration = 8;

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
  const bool any_twice = std::any_of(times.begin(), times.end(), [](const auto& sample) { return sample.second > 1; });
  if (times.size() != complete * kBatch) wrongs.push_back("samples were left out");
  if (any_twice) wrongs.push_back("samples were counted twice");
}

// Processes that were in the run may add where one of them was. Processes that waited as long say so at the same time.
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
  if (lost_all(course)) names.push_back(kLostAll);
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
  const bool all_done = std::all_of(course.outcomes.begin(), course.outcomes.end(), is_done);
  if (first != nullptr && any_well && !(all_done && store_is_gone(course)))
    wrongs.push_back("some processes ended well, others did not: " + *first);
  for (const auto& strike : strikes) {
    if (strike.is_by_rank() && any_well) wrongs.push_back("a process ended well in spite of the fault");
    const bool lacks_one = strike.fault == Fault::kill && !is_done(course.outcomes[strike.victim]);
    if (lacks_one && any_well) wrongs.push_back("a process ended well although one was killed before");
  }
}

// Somebody finishes an elastic job as long as one who has its state is left, and the launcher.
void check_elastic(const Course& course, Texts& wrongs) {
  if (!course.plan.is_elastic()) return;
  for (size_t i = 1; i < course.generations.size(); ++i) {
    if (!course.generations[i].members.empty()) continue;
    for (const int member : course.generations[i - 1].members) {
      if (!is_faulty(course, member)) wrongs.push_back("nobody is left, though " + name(member) + " was not struck");
    }
  }
  if (must_end_well(course) && std::none_of(course.outcomes.begin(), course.outcomes.end(), is_done))
    wrongs.push_back("nobody finished the job");
}

// A generation's keys stay in the store. The number of keys depends on the members alone, not on what they do.
void check_keys(const Course& course, Texts& wrongs) {
  for (const auto& past : course.generations) {
    const int most = kKeysOfMember * static_cast<int>(past.members.size()) + kKeysOfGeneration;
    if (past.keys > most) wrongs.push_back("a generation has left " + std::to_string(past.keys) + " keys in the store");
  }
}

// If the last generation's first member was lost after all had finished, nobody knows whether it was done with the
// run's files.
bool may_lack_files(const Course& course) {
  for (auto past = course.generations.rbegin(); past != course.generations.rend(); ++past) {
    if (past->members.empty()) continue;
    const int first = past->members.front();
    return is_faulty(course, first) || !course.outcomes[first].over;
  }
  return false;
}

// The launcher has succeeded if the job has, and else says why, where its processes could not.
void check_launcher(const Course& course, Texts& wrongs) {
  if (!course.launcher_code) return;
  const int code = *course.launcher_code;
  const bool must_fail = lost_all(course) || is_nobody_left(course);
  if (!may_lack_files(course) && (must_fail ? code == 0 : must_end_well(course) && code != 0))
    wrongs.push_back("the launcher has ended with exit code " + std::to_string(code));
  const auto says = [&](const char* words) {
    return std::any_of(course.said.begin(), course.said.end(),
                       [&](const std::string& text) { return text.find(words) != text.npos; });
  };
  const bool says_that_all_are_gone = says("so nobody could go on");
  if (is_nobody_left(course) && !says_that_all_are_gone && !says("before the program took part"))
    wrongs.push_back("the launcher does not say why the job has ended");
  if (says_that_all_are_gone && !is_nobody_left(course)) wrongs.push_back("the launcher says that all are gone");
}

// A rank completes a step only once rank 0 has kept the steps before it, so none of these may lack a checkpoint.
void check_was_kept(const Course& course, int process, Texts& wrongs) {
  const Outcome& outcome = course.outcomes[process];
  if (!course.plan.checkpoints || has(happened(course), Fault::lost_fsync)) return;
  const auto steps = static_cast<int>(outcome.ranks[0].weights.size());
  const bool ended_well = outcome.over && outcome.text.empty() && steps == kSteps;
  const int least = (ended_well ? steps : std::max(steps - 1, 0)) / kBetweenCheckpoints * kBetweenCheckpoints;
  if (course.saved >= least) return;
  wrongs.push_back(name(process) + " has completed step " + std::to_string(steps - 1) +
                   ", and the last checkpoint is of " + std::to_string(course.saved) + " steps");
}

// From the newest checkpoint a run goes on, with the weights that it had then.
void check_checkpoint(const Course& course, const Reference* reference, Texts& wrongs) {
  const bool may_have_none = has(happened(course), Fault::lost_fsync) && course.saved == 0;
  if (!course.unreadable.empty() && !may_have_none) wrongs.push_back("no checkpoint can be read: " + course.unreadable);
  if (course.found < course.saved) {
    wrongs.push_back("the newest checkpoint is of step " + std::to_string(course.found) + ", but one of step " +
                     std::to_string(course.saved) + " was written");
  }
  if (course.found > 0 && reference != nullptr) {
    const std::string which = "the checkpoint of step " + std::to_string(course.found);
    if (course.found_state.weights != reference->weights[course.found - 1])
      wrongs.push_back(which + " has other weights");
    if (course.found_state.optimizer != reference->optimizers[course.found - 1])
      wrongs.push_back(which + " has another optimizer's state");
  }
  for (const auto& file : course.files_left) wrongs.push_back(file + " was left in the run's folder");
  for (int process = 0; process < static_cast<int>(course.outcomes.size()); ++process)
    check_was_kept(course, process, wrongs);
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
  check_results(course, reference, wrongs);
  if (course.plan.program == Program::data_parallel) check_samples(course, wrongs);
  check_errors(course, wrongs);
  check_elastic(course, wrongs);
  check_keys(course, wrongs);
  check_launcher(course, wrongs);
  check_checkpoint(course, reference, wrongs);
  if (const Time longest = longest_end(course); !happened(course).empty() && longest > allowed(course)) {
    wrongs.push_back("the last process ended " + std::to_string(longest / kMillisecond) + " ms after the fault");
  }
  for (int process = 0; process < static_cast<int>(course.outcomes.size()); ++process) {
    const Outcome& outcome = course.outcomes[process];
    // A generation that breaks while it connects leaves threads in Gloo for as long as that waits.
    const bool may_connect = course.plan.is_elastic() && !happened(course).empty();
    if (!outcome.over || !outcome.text.empty() || may_connect) continue;
    for (const auto& [count, what] : {std::pair(outcome.threads_left, " threads"),
                                      {outcome.connections_left, " connections to a store"},
                                      {outcome.groups_left, " groups"}}) {
      if (count > 0) wrongs.push_back(name(process) + " left " + std::to_string(count) + what + " behind");
    }
  }
  return wrongs;
}

}  // namespace lockstep::simulation

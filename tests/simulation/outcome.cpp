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

// Those who were in the run may add where one of them was. Those who have waited for as long say so at the same time.
bool say_the_same(const std::string& one, const std::string& other) {
  const auto about = [](const std::string& text) {
    const size_t waited = text.find(" waited ");
    return text.starts_with("process ") && waited != text.npos ? text.substr(waited) : text;
  };
  return about(one).starts_with(about(other)) || about(other).starts_with(about(one));
}

// Of several machines the first launcher may hear of another process's end before it hears of that of the one which
// threw. Whoever waits to join is told of that one, whose own error names the guilty.
bool blames_a_follower(const Course& course, const Outcome& outcome) {
  if (!course.plan.has_agents()) return false;
  for (int process = 0; process < static_cast<int>(course.outcomes.size()); ++process) {
    const bool is_follower = course.outcomes[process].text.find("thrown by the test") != outcome.text.npos;
    if (is_follower && outcome.text.starts_with(name(process) + " of the job is gone: it ended with exit code 1"))
      return true;
  }
  return false;
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
    if (std::none_of(names.begin(), names.end(), is_named) &&
        !(has(strikes, Fault::throws) && blames_a_follower(course, outcome))) {
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

// A generation's keys stay in the store. How many they are depends on its members alone, not on what they do.
void check_keys(const Course& course, Texts& wrongs) {
  for (const auto& past : course.generations) {
    const int most = kKeysOfMember * static_cast<int>(past.members.size()) + kKeysOfGeneration;
    if (past.keys > most) wrongs.push_back("a generation has left " + std::to_string(past.keys) + " keys in the store");
  }
}

bool may_lose_node(const Strike& strike, int node) {
  const bool strikes_it = strike.is_of_node() && strike.victim == node && !strike.is_harmless();
  return strikes_it || (strike.fault == Fault::slow_agent && strike.victim == node) || strike.fault == Fault::late;
}

bool may_lose_node(const Course& course, int node) {
  const Strikes strikes = happened(course);
  return std::any_of(strikes.begin(), strikes.end(), [&](const Strike& strike) { return may_lose_node(strike, node); });
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

// What the first launcher says of other machines must be so.
void check_first(const Course& course, Texts& wrongs) {
  const Launched& first = course.launchers[0];
  for (const auto& [node, time] : course.lost_nodes) {
    if (!may_lose_node(course, node)) wrongs.push_back("node " + std::to_string(node) + " was lost without a fault");
  }
  bool may_lack_one = false;
  for (int node = 1; node < course.plan.nodes; ++node) may_lack_one |= may_lose_node(course, node);
  if (lacks_machines(course) && !may_lack_one) wrongs.push_back("a machine was not waited for");
  if (!first.over) return;
  if (may_lack_files(course)) return;
  const bool must_fail = lost_all(course) || is_nobody_left(course) || lacks_machines(course);
  if (must_fail ? first.code == 0 : must_end_well(course) && first.code != 0)
    wrongs.push_back("the first launcher has ended with exit code " + std::to_string(first.code));
}

// Until when a machine's launcher may take. It waits 20 s for the first one, and its processes have 5 s to end.
Time latest_end(const Course& course, const Launched& agent) {
  Time latest = std::max(course.launchers[0].end, agent.start);
  for (size_t i = 0; i < course.times.size(); ++i) {
    if (course.times[i] != kNever) latest = std::max(latest, course.times[i] + course.plan.strikes[i].length);
  }
  return latest + 32 * kSecond;
}

// Whether a machine was lost, and was itself again so long before the job's end that its launcher must have come again.
bool must_have_come_again(const Course& course, const Launched& agent) {
  const Launched& first = course.launchers[0];
  const auto of_node = std::count_if(course.launchers.begin(), course.launchers.end(),
                                     [&](const Launched& other) { return other.node == agent.node; });
  if (of_node > 1 || !first.over || course.plan.has(Fault::late)) return false;
  Time again = kNever;
  for (size_t i = 0; i < course.times.size(); ++i) {
    const Strike& strike = course.plan.strikes[i];
    if (!strike.is_of_node() || strike.victim != agent.node || course.times[i] == kNever) continue;
    const bool passes = strike.fault == Fault::stop_agent || strike.fault == Fault::stop_node;
    if (!passes || again != kNever) return false;
    again = course.times[i] + strike.length;
  }
  return again != kNever && again + kSecond / 2 < first.end &&
         std::any_of(course.lost_nodes.begin(), course.lost_nodes.end(),
                     [&](const auto& lost) { return lost.first == agent.node && lost.second < again; });
}

// Whoever has no fault ends as the job does, and an error tells whose fault it is.
void check_agent(const Course& course, const Launched& agent, const std::string& who, Texts& wrongs) {
  const Launched& first = course.launchers[0];
  const std::string last_words = agent.said.empty() ? "nothing was said" : agent.said.back();
  const bool well = first.over && first.code == 0;
  const bool refused = says(agent, "two agents say that they are node") || says(agent, "was started with");
  const bool may_be_refused = course.plan.has(Fault::twin_agent) || course.plan.has(Fault::other_agent);
  if (agent.end > latest_end(course, agent)) wrongs.push_back(who + " took too long");
  if (must_have_come_again(course, agent) && !says(agent, "joins again")) wrongs.push_back(who + " did not come again");
  if (refused && !may_be_refused) wrongs.push_back(who + " was refused");
  if (refused && first.over && !says(first, "turned away: ")) wrongs.push_back("nobody was told who was turned away");
  if (agent.code == 0) {
    if (!well) wrongs.push_back(who + " ended well, and the job did not");
    if (agent.processes != course.plan.places()) wrongs.push_back(who + " was let in");
    return;
  }
  const bool came_late = agent.node >= course.plan.nodes && agent.start + 300 * kMillisecond > first.end;
  const bool is_excused =
      agent.is_extra || came_late || (refused && may_be_refused);  // nobody knows which of two is meant
  if (well && !may_lose_node(course, agent.node) && !is_excused) wrongs.push_back(who + " failed: " + last_words);
  for (const char* const words :
       {"node 0 is gone: its launcher keeps the job's store",
        "node 0 has ended the job: ", "the store that node 0's launcher", "two agents say that they are node",
        "was started with", "which node 0's launcher keeps", " is gone: it "}) {  // its own process
    if (says(agent, words)) return;
  }
  wrongs.push_back(who + " names nobody: " + last_words);
}

void check_agents(const Course& course, Texts& wrongs) {
  for (size_t i = 1; i < course.launchers.size(); ++i) {
    const Launched& agent = course.launchers[i];
    const std::string who = "launcher " + std::to_string(i) + ", of node " + std::to_string(agent.node) + ",";
    if (agent.over) check_agent(course, agent, who, wrongs);  // else it was killed
  }
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
      if (plan.has_agents()) return 12 * kSecond;  // their steps take longer
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
  if (course.plan.has_agents()) check_first(course, wrongs);
  if (course.plan.has_agents()) check_agents(course, wrongs);
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

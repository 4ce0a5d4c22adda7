#include "first_launcher.hpp"

#include "base/seconds.hpp"

#include <utility>

namespace lockstep::comm {
namespace {

constexpr std::chrono::milliseconds kBetweenHearts{90};  // looks at hearts. Agents' words are looked for at every call

std::string process_text(int member) {
  return "process " + std::to_string(member);
}

}  // namespace

FirstLauncher::FirstLauncher(const StorePtr& store, Job job, LaunchedMachine& machine, Announce announce)
    : job_(std::move(job)),
      machine_(machine),
      announce_(std::move(announce)),
      elastic_(store, job_.name, job_.processes, job_.restarts, job_.limits, job_.machines) {}

void FirstLauncher::begin() {
  if (!has_agents()) start_all();
}

void FirstLauncher::start_all() {
  begun_ = true;
  for (const auto& start : elastic_.begin()) this->start(start);
}

void FirstLauncher::start(const ElasticLaunch::Start& start) {
  if (start.node == 0) machine_.start(start.member, start.place);
}

std::string FirstLauncher::process_is_gone(int member) const {
  return process_text(member) + " of node " + std::to_string(elastic_.node_of(member)) + " is gone: ";
}

bool FirstLauncher::note_end(int member, const ProcessEnd& end, bool killed) {
  const bool go_on = elastic_.note_end(member, end, killed);
  if (!go_on && end.failed && why_.empty()) why_ = process_is_gone(member) + end.how;
  if (!go_on && !elastic_.takes_part()) announce_(member, elastic_.place_of(member), end);
  return go_on;
}

bool FirstLauncher::look(int ending) {
  if (has_agents()) {
    is_ending_ = ending != 0;
    if (is_ending_) end_agents(ending);
    hear();
    if (ending == 0) ending = code_;
    if (!begun_) return ending == 0 ? wait_for_agents() : !elastic_.agents_are_gone();
  }
  if (ending == 0 && (!has_agents() || Clock::now() - looked_ >= kBetweenHearts)) {
    looked_ = Clock::now();
    look_at_hearts();
    if (start_successors()) return true;
    if (elastic_.lacks_successors() && !std::exchange(said_that_none_are_left_, true)) {
      machine_.say("no successors are left, since at most " + std::to_string(job_.restarts) + " start (" +
                   job_.restarts_name + ")");
    }
  }
  if (!has_agents()) return false;
  if (!elastic_.some_run()) end_agents(ending);
  return !elastic_.agents_are_gone();
}

// Their users learn why. Nobody asks why all has succeeded.
void FirstLauncher::end_agents(int code) {
  if (why_.empty()) why_ = "it was ended there";
  elastic_.end(code, code == 0 ? "" : "node 0 has ended the job: " + why_);
}

void FirstLauncher::end_all(int code) {
  if (code_ == 0) code_ = code;
  machine_.end_all(code);
}

// Gives whether to go on waiting.
bool FirstLauncher::wait_for_agents() {
  const auto absent = elastic_.absent_nodes();
  if (absent.empty()) {
    start_all();
  } else if (Clock::now() - made_ > job_.limits.until_first_beat) {
    std::string list;
    for (const int node : absent) list += (list.empty() ? "" : ", ") + std::to_string(node);
    machine_.say("no launcher has come from node" + (absent.size() == 1 ? " " + list : "s " + list) + " within " +
                 seconds(job_.limits.until_first_beat) + ". " + job_.how_to_start_one +
                 "; if it only takes long, raise LOCKSTEP_RENDEZVOUS_TIMEOUT (seconds)");
    why_ = "not all machines have come";
    end_all(1);
  }
  return true;
}

// What happens on other machines.
void FirstLauncher::hear() {
  const auto heard = elastic_.hear();
  for (const auto& why : heard.refused) machine_.say("turned away: " + why);
  for (const auto& report : heard.ended) {
    const bool go_on = note_end(report.member, report.end, report.killed);
    if (!report.end.failed) continue;
    machine_.say(process_is_gone(report.member) + report.end.how + (go_on ? "; the others go on without it" : ""));
    if (!go_on) end_all(report.code);
  }
  for (const auto& loss : heard.lost) lose(loss);
  for (const int node : heard.came) {
    if (begun_) machine_.say("node " + std::to_string(node) + " has come");
  }
}

void FirstLauncher::lose(const ElasticLaunch::Heard::LostNode& loss) {
  const bool asked = loss.code && *loss.code > 128;  // a signal to one launcher ends the job everywhere
  if (loss.code && (is_ending_ || (loss.members.empty() && !asked))) return;  // it has ended with its processes
  const std::string how =
      "node " + std::to_string(loss.node) + " is gone: its launcher " +
      (loss.code ? "has ended with exit code " + std::to_string(*loss.code) : std::string("gives no sign of life"));
  const bool go_on = loss.go_on && !asked;
  machine_.say(how + (!go_on || is_ending_ || !elastic_.some_run() ? ""
                      : begun_                                     ? "; the others go on without it"
                                                                   : "; the job begins once it has come again"));
  if (go_on || is_ending_) return;
  if (why_.empty()) why_ = how;
  end_all(asked ? *loss.code : 1);
}

void FirstLauncher::look_at_hearts() {
  const auto now = elastic_.look();
  for (const int member : now.joined) machine_.say(process_text(member) + " has joined");
  for (const int member : now.given_up) {
    machine_.say(process_text(member) +
                 " gets no successor, which would need as much memory: the kernel has probably killed another process "
                 "of this machine for want of it before. The job goes on with fewer processes");
  }
  for (const int member : now.dead) {
    machine_.say(process_text(member) + " stands still, and is killed");
    kill(member);
  }
  for (const int member : now.late) {
    machine_.say(process_text(member) + " has not begun to train within " + seconds(job_.limits.until_first_beat) +
                 ", nor in twice the others' time, and is killed. If starting only takes long, raise "
                 "LOCKSTEP_RENDEZVOUS_TIMEOUT (seconds)");
    kill(member);
  }
}

void FirstLauncher::kill(int member) {
  elastic_.node_of(member) == 0 ? machine_.kill(member) : elastic_.kill(member);
}

bool FirstLauncher::start_successors() {
  const auto starts = elastic_.successors();
  for (const auto& start : starts) {
    this->start(start);
    machine_.say(process_text(start.member) + " starts in the place of rank " + std::to_string(start.place) +
                 (has_agents() ? ", on node " + std::to_string(start.node) : ""));
  }
  return !starts.empty();
}

}  // namespace lockstep::comm

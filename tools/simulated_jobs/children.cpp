#include "children.hpp"

#include <algorithm>

namespace lockstep::simulation {
namespace {

constexpr Time kLook = 100 * kMillisecond;  // how often the launcher looks
constexpr int kKilled = 128 + 9;

}  // namespace

int Children::wait(comm::ElasticLauncher& launcher,
                   const std::function<std::string(const std::string& folder)>& newest_in) {
  for (;;) {
    const bool some_run = reap(launcher);
    const bool has_started_one = to_kill_ == kNever && launcher.look();
    if (!some_run && !has_started_one) {
      if (first_failure_ != 0) launcher.say_why(newest_in);
      return first_failure_;
    }
    if (scheduler_.now() >= to_kill_) {
      for (const Child& child : children_) kill(child.member);
    }
    const Time next_look = scheduler_.now() + kLook;
    scheduler_.wait(hooks_.ends, to_kill_ > scheduler_.now() ? std::min(to_kill_, next_look) : next_look);
  }
}

bool Children::reap(comm::ElasticLauncher& launcher) {
  bool some_run = false;
  for (size_t i = 0; i < children_.size(); ++i) {
    Child& child = children_[i];
    if (child.runs && !child.process->lives()) {
      child.runs = false;
      note_end(child, launcher);
    }
    some_run |= children_[i].runs;
  }
  return some_run;
}

void Children::note_end(const Child& child, comm::ElasticLauncher& launcher) {
  const int member = child.member;
  const bool killed = child.process->killed, failed = killed || !hooks_.failure_of(member).empty();
  const std::string how = killed   ? "it was ended by signal 9 (Killed)"
                          : failed ? "it ended with exit code 1"
                                   : "it ended";
  const bool go_on = launcher.note_end(member, {failed, false, how}, killed && to_kill_ == kNever);
  if (!failed || go_on) return;
  say("process " + std::to_string(member) + " is gone: " + how);
  if (first_failure_ == 0) first_failure_ = killed ? kKilled : 1;
  if (to_kill_ == kNever) to_kill_ = scheduler_.now() + kUntilKilled;
}

void Children::start(int member, int place) {
  children_.push_back({member, &hooks_.start(member, place), true});
}

void Children::kill(int member) {
  for (const Child& child : children_) {
    if (child.member == member && child.process->lives()) hooks_.kill(member);
  }
}

}  // namespace lockstep::simulation

#include "machine.hpp"

#include <algorithm>

namespace lockstep::simulation {
namespace {

constexpr Time kUntilKilled = 5 * kSecond;  // after the first failure
constexpr int kKilled = 128 + 9;

}  // namespace

int Machine::wait(const Launcher& launcher) {
  for (;;) {
    const bool some_run = reap(launcher);
    const bool more_is_to_come = launcher.look(to_kill_ == kNever ? 0 : std::max(first_failure_, 1));
    if (!some_run && !more_is_to_come) return first_failure_;
    if (scheduler_.now() >= to_kill_) {
      for (const Child& child : children_) kill(child.member);
    }
    const Time next_look = scheduler_.now() + between_looks_;
    scheduler_.wait(hooks_.ends, to_kill_ > scheduler_.now() ? std::min(to_kill_, next_look) : next_look);
  }
}

bool Machine::reap(const Launcher& launcher) {
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

void Machine::note_end(const Child& child, const Launcher& launcher) {
  const int member = child.member;
  const bool killed = child.process->killed, failed = killed || !hooks_.failure_of(member).empty();
  const int code = killed ? kKilled : failed ? 1 : 0;
  const std::string how = killed   ? "it was ended by signal 9 (Killed)"
                          : failed ? "it ended with exit code 1"
                                   : "it ended";
  const bool go_on = launcher.note_end(member, {failed, false, how}, killed && to_kill_ == kNever, code);
  if (!failed || go_on) return;
  say("process " + std::to_string(member) + " is gone: " + how);
  if (first_failure_ == 0) first_failure_ = code;
  if (to_kill_ == kNever) to_kill_ = scheduler_.now() + kUntilKilled;
}

void Machine::start(int member, int place) {
  children_.push_back({member, &hooks_.start(member, place), true});
}

void Machine::kill(int member) {
  for (const Child& child : children_) {
    if (child.member == member && child.process->lives()) hooks_.kill(member);
  }
}

void Machine::end_all(int code) {
  if (first_failure_ == 0) first_failure_ = code;
  if (to_kill_ == kNever) to_kill_ = scheduler_.now() + kUntilKilled;
}

}  // namespace lockstep::simulation

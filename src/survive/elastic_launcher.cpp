#include "elastic_launcher.hpp"

#include "base/seconds.hpp"

#include <utility>

namespace lockstep::comm {
namespace {

std::string process_text(int member) {
  return "process " + std::to_string(member);
}

}  // namespace

ElasticLauncher::ElasticLauncher(const StorePtr& store, Job job, LaunchedProcesses& processes, Announce announce)
    : job_(std::move(job)),
      processes_(processes),
      announce_(std::move(announce)),
      elastic_(store, job_.name, job_.processes, job_.restarts, job_.limits) {}

void ElasticLauncher::begin() {
  for (const auto& start : elastic_.begin()) processes_.start(start.member, start.place);
}

bool ElasticLauncher::note_end(int member, const ProcessEnd& end, bool killed) {
  const bool go_on = elastic_.note_end(member, end, killed);
  if (!go_on && !elastic_.takes_part()) announce_(member, elastic_.place_of(member), end);
  return go_on;
}

bool ElasticLauncher::look() {
  look_at_hearts();
  if (start_successors()) return true;
  if (elastic_.lacks_successors() && !std::exchange(said_that_none_are_left_, true)) {
    processes_.say("no successors are left, since at most " + std::to_string(job_.restarts) + " start (" +
                   job_.restarts_name + ")");
  }
  return false;
}

void ElasticLauncher::say_why(const std::function<std::string(const std::string& folder)>& newest_in) {
  if (!elastic_.has_lost()) return;
  if (!elastic_.takes_part()) {
    processes_.say(
        "a process was killed before the program took part in the elastic job, so the others cannot go on. lockstep "
        "train, fit() and a run() with lockstep::elastic take part once they begin to train: start the job again, "
        "since no step is lost. Other programs never take part: start them as a job that is not elastic");
  } else if (elastic_.has_lost_all()) {
    const std::string folder = elastic_.folder(), newest = folder.empty() ? "" : newest_in(folder);
    const std::string what_to_do = folder.empty()
                                       ? "Start the job again"
                                       : "Start the job again with `resume` auto (keep.resume in a fit()): it " +
                                             (newest.empty() ? "begins anew, since there is no checkpoint"
                                                             : "goes on from its newest checkpoint, " + newest);
    processes_.say("all processes that had the state of the training are gone, so nobody could go on. " + what_to_do);
  }
}

void ElasticLauncher::look_at_hearts() {
  const auto now = elastic_.look();
  for (const int member : now.joined) processes_.say(process_text(member) + " has joined");
  for (const int member : now.given_up) {
    processes_.say(process_text(member) +
                   " gets no successor, which would need as much memory: the kernel has probably killed another "
                   "process for want of it before. The job goes on with fewer processes");
  }
  for (const int member : now.dead) {
    processes_.say(process_text(member) + " stands still, and is killed");
    processes_.kill(member);
  }
  for (const int member : now.late) {
    processes_.say(process_text(member) + " has not begun to train within " + seconds(job_.limits.until_first_beat) +
                   ", nor in twice the others' time, and is killed. If starting only takes long, raise "
                   "LOCKSTEP_RENDEZVOUS_TIMEOUT (seconds)");
    processes_.kill(member);
  }
}

bool ElasticLauncher::start_successors() {
  const auto starts = elastic_.successors();
  for (const auto& start : starts) {
    processes_.start(start.member, start.place);
    processes_.say(process_text(start.member) + " starts in the place of rank " + std::to_string(start.place));
  }
  return !starts.empty();
}

}  // namespace lockstep::comm

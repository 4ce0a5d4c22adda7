#include "elastic_launch.hpp"

#include <algorithm>
#include <utility>

namespace lockstep::comm {

ElasticLaunch::ElasticLaunch(const StorePtr& store, std::string job, int processes, int restarts, const Limits& limits)
    : store_(store), job_(std::move(job)), generations_(store, job_), restarts_left_(restarts), limits_(limits) {
  generations_.begin(processes);
  for (int place = 0; place < processes; ++place) members_.push_back({place, /*is_in=*/true});
}

std::vector<ElasticLaunch::Start> ElasticLaunch::begin() {
  std::vector<Start> starts;
  for (int member = 0; member < static_cast<int>(members_.size()); ++member) starts.push_back(started(member));
  return starts;
}

ElasticLaunch::Start ElasticLaunch::started(int member) {
  members_[member].seen = Clock::now();
  return {member, place_of(member)};
}

bool ElasticLaunch::note_end(int member, const ProcessEnd& end, bool killed) {
  const bool is_loss = end.failed && (killed || !generations_.newest().index_of(member));
  has_failed_ = has_failed_ || (end.failed && !is_loss);
  has_lost_ = has_lost_ || is_loss;
  if (is_loss) lost_ = Clock::now();
  members_[member].has_ended = true;
  const auto now = is_loss ? generations_.lose(member) : generations_.end();
  has_lost_all_ = has_lost_all_ || (is_loss && now.members.empty());
  // A death would let the others go on without it.
  const auto cause = is_loss || !end.failed ? Error::death : end.stopped ? Error::stopped : Error::user_code;
  call_off_until(now, {"process " + std::to_string(member) + " of the job is gone: " + end.how, {cause}});
  if (is_loss && now.over) return is_dispensable(member, now);
  if (!is_loss || now.over) return false;
  vacate(member, end.lacked_memory);
  return true;
}

// Tells whether a member may be lost after the others of a training have come to their end. The first member may not,
// since it keeps the run's files and perhaps still writes.
bool ElasticLaunch::is_dispensable(int member, const Generation& last) {
  return takes_part() && !has_failed_ && !last.members.empty() && last.members.front() != member;
}

void ElasticLaunch::call_off_until(const Generation& now, const Failure& failure) {
  for (; called_off_ < now.number; ++called_off_) {
    call_off(store_, job_, called_off_, failure);
  }
}

// Vacates a place, whose successor needs as much memory as the process that was killed. The first process killed for
// want of memory gets a successor, since memory may have been short for a moment only. After that the machine has too
// little for so many processes, whichever of them the kernel kills.
void ElasticLaunch::vacate(int member, bool lacked_memory) {
  if (lacked_memory && std::exchange(lacked_memory_, true)) {
    given_up_.push_back(member);
    return;
  }
  if (restarts_left_ > 0) vacant_.push_back(members_[member].place);
  lacks_successors_ = lacks_successors_ || restarts_left_ == 0;
}

std::vector<ElasticLaunch::Start> ElasticLaunch::successors() {
  if (vacant_.empty() || has_come_to_its_end_ || !generations_.takes_part()) return {};
  const auto now = generations_.newest();
  const bool go_on = generations_.has_begun(now.number) || Clock::now() - lost_ >= limits_.until_start;
  if (now.over || !go_on) return {};
  std::vector<Start> starts;
  for (const int place : std::exchange(vacant_, {})) {
    if (restarts_left_ == 0) {
      lacks_successors_ = true;
      break;
    }
    --restarts_left_;
    members_.push_back({place, /*is_in=*/false});
    starts.push_back(started(static_cast<int>(members_.size()) - 1));
  }
  return starts;
}

ElasticLaunch::Look ElasticLaunch::look() {
  const auto time = Clock::now();
  const auto since_last = time - std::exchange(looked_, time);
  looks_.beat(time);
  const auto now = generations_.newest();
  std::vector<std::optional<Generations::Heart>> hearts(members_.size());
  const auto count = static_cast<int>(members_.size());
  auto limit = looks_.limit();                      // if one process beats late, the others may too
  for (int number = 0; number < count; ++number) {  // reads all hearts before it calls any process late
    Member& member = members_[number];
    if (member.has_ended) continue;
    hearts[number] = generations_.heart_of(number);
    if (!hearts[number]) continue;
    limit = std::max(limit, hearts[number]->silence);
    if (!std::exchange(member.has_begun, true))
      longest_start_ = std::max(longest_start_.value_or(Clock::duration()), time - member.seen);
  }
  Look look;
  look.given_up = std::exchange(given_up_, {});
  for (int number = 0; number < count; ++number) {
    Member& member = members_[number];
    if (member.has_ended) continue;
    const bool was_in = std::exchange(member.is_in, now.index_of(number).has_value());
    if (!was_in && member.is_in) coming_.push_back(number);
    const auto& heart = hearts[number];
    has_come_to_its_end_ = has_come_to_its_end_ || (member.is_in && heart && heart->silence.count() == 0);
    const bool beats = heart && (std::exchange(member.beats, heart->beats) != heart->beats || heart->beats == 0);
    // If the time between two looks is more than half of the limit, this process stood still (Ctrl-Z, a paused
    // machine), and others may have too.
    const auto silence = heart ? std::min(limit, heart->most) : limits_.until_first_beat;
    const bool stood_still = since_last > silence / 2;
    if (beats || stood_still) member.seen = time;
    const bool is_late = !heart && longest_start_ &&
                         time - member.seen > std::max<Clock::duration>(limits_.until_first_beat, 2 * *longest_start_);
    const bool is_silent = heart && time - member.seen > silence;
    const bool is_dead = (was_in && !member.is_in) || is_silent;
    if (is_dead) look.dead.push_back(number);
    if (is_late && !is_dead) look.late.push_back(number);
    if (is_dead || is_late) member.seen = time;  // reports the member once
  }
  if (coming_.empty() || !generations_.has_begun(now.number)) return look;
  for (const int number : std::exchange(coming_, {})) {
    if (members_[number].is_in) look.joined.push_back(number);
  }
  return look;
}

}  // namespace lockstep::comm

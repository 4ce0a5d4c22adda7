#include "elastic_launch.hpp"

#include <algorithm>
#include <optional>
#include <utility>

namespace lockstep::comm {

ElasticLaunch::ElasticLaunch(const StorePtr& store, std::string job, int processes, int restarts, const Limits& limits)
    : store_(store), job_(std::move(job)), generations_(store, job_), restarts_left_(restarts), limits_(limits) {
  generations_.begin(processes);
  for (int place = 0; place < processes; ++place) members_.push_back({place, /*is_in=*/true});
}

bool ElasticLaunch::note_end(int member, const ProcessEnd& end, bool killed) {
  const bool is_loss = end.failed && (killed || !generations_.newest().index_of(member));
  has_lost_ = has_lost_ || is_loss;
  if (is_loss) lost_ = Clock::now();
  members_[member].has_ended = true;
  const auto now = is_loss ? generations_.lose(member) : generations_.end();
  const auto kind = is_loss || !end.failed ? Failure::Kind::death
                    : end.stopped          ? Failure::Kind::stop
                                           : Failure::Kind::error;
  for (; called_off_ < now.number; ++called_off_) {
    call_off(store_, job_, called_off_,
             {"process " + std::to_string(member) + " of the job is gone: " + end.how, kind});
  }
  // A successor that had not joined when the others came to their end is no loss.
  if (is_loss && now.over && !now.members.empty() && !now.index_of(member)) return true;
  if (!is_loss || now.over) return false;
  if (restarts_left_ > 0) vacant_.push_back(members_[member].place);
  return true;
}

std::vector<int> ElasticLaunch::successors() {
  if (vacant_.empty() || !generations_.takes_part()) return {};
  const auto now = generations_.newest();
  const bool go_on = generations_.has_begun(now.number) || Clock::now() - lost_ >= limits_.until_start;
  if (now.over || !go_on) return {};
  std::vector<int> places;
  for (const int place : std::exchange(vacant_, {})) {
    if (restarts_left_ == 0) break;
    --restarts_left_;
    members_.push_back({place, /*is_in=*/false});
    places.push_back(place);
  }
  return places;
}

ElasticLaunch::Look ElasticLaunch::look() {
  const auto time = Clock::now();
  const auto since_last = time - std::exchange(looked_, time);
  const auto now = generations_.newest();
  std::vector<std::optional<Generations::Heart>> hearts(members_.size());
  for (int number = 0; number < members(); ++number) {  // all, before one of them is late
    Member& member = members_[number];
    if (member.has_ended) continue;
    hearts[number] = generations_.heart_of(number);
    if (hearts[number] && !std::exchange(member.has_begun, true))
      longest_start_ = std::max(longest_start_.value_or(Clock::duration()), time - member.seen);
  }
  Look look;
  for (int number = 0; number < members(); ++number) {
    Member& member = members_[number];
    if (member.has_ended) continue;
    const bool was_in = std::exchange(member.is_in, now.index_of(number).has_value());
    if (!was_in && member.is_in) coming_.push_back(number);
    const auto& heart = hearts[number];
    const bool beats = heart && (std::exchange(member.beats, heart->beats) != heart->beats || heart->beats == 0);
    // Much of the silence between two looks: this process stood still (Ctrl-Z, a machine that was paused), and others
    // maybe too.
    const bool stood_still = since_last > (heart ? heart->silence : limits_.until_first_beat) / 2;
    if (beats || stood_still) member.seen = time;
    const bool is_late = !heart && longest_start_ &&
                         time - member.seen > std::max<Clock::duration>(limits_.until_first_beat, 2 * *longest_start_);
    const bool is_dead = (was_in && !member.is_in) || (heart && time - member.seen > heart->silence);
    if (is_dead) look.dead.push_back(number);
    if (is_late && !is_dead) look.late.push_back(number);
    if (is_dead || is_late) member.seen = time;  // so that it is reported once
  }
  if (coming_.empty() || !generations_.has_begun(now.number)) return look;
  for (const int number : std::exchange(coming_, {})) {
    if (members_[number].is_in) look.joined.push_back(number);
  }
  return look;
}

}  // namespace lockstep::comm

#include "elastic_launch.hpp"

#include <utility>

namespace lockstep::comm {
namespace {

constexpr std::chrono::seconds kLauncherStood{
    2};  // between two looks: this process stood still (Ctrl-Z), others maybe too

}  // namespace

ElasticLaunch::ElasticLaunch(const StorePtr& store, std::string job, int processes, int restarts)
    : store_(store), job_(std::move(job)), generations_(store, job_), restarts_left_(restarts) {
  generations_.begin(processes);
  for (int place = 0; place < processes; ++place) members_.push_back({place, /*is_in=*/true});
}

bool ElasticLaunch::note_end(int member, const ProcessEnd& end, bool killed) {
  const bool is_loss = end.failed && (killed || !generations_.newest().index_of(member));
  has_lost_ = has_lost_ || is_loss;
  members_[member].has_ended = true;
  const auto now = is_loss ? generations_.lose(member) : generations_.end();
  const auto kind = is_loss || !end.failed ? Failure::Kind::death
                    : end.stopped          ? Failure::Kind::stop
                                           : Failure::Kind::error;
  for (; called_off_ < now.number; ++called_off_) {
    call_off(store_, job_, called_off_,
             {"process " + std::to_string(member) + " of the job is gone: " + end.how, kind});
  }
  if (!is_loss || now.over) return false;
  if (restarts_left_ > 0) vacant_.push_back(members_[member].place);
  return true;
}

std::vector<int> ElasticLaunch::successors() {
  if (vacant_.empty() || !generations_.takes_part() || generations_.newest().over) return {};
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
  const bool stood_still = time - std::exchange(looked_, time) > kLauncherStood;
  const auto now = generations_.newest();
  Look look;
  for (int number = 0; number < members(); ++number) {
    Member& member = members_[number];
    if (member.has_ended) continue;
    const bool was_in = std::exchange(member.is_in, now.index_of(number).has_value());
    if (!was_in && member.is_in) coming_.push_back(number);
    const auto heart = generations_.heart_of(number).value_or(Generations::Heart{});
    if (std::exchange(member.beats, heart.beats) != heart.beats || stood_still || heart.beats == 0) member.seen = time;
    if ((was_in && !member.is_in) || time - member.seen > heart.silence) look.dead.push_back(number);
  }
  if (coming_.empty() || !generations_.has_begun(now.number)) return look;
  for (const int number : std::exchange(coming_, {})) {
    if (members_[number].is_in) look.joined.push_back(number);
  }
  return look;
}

}  // namespace lockstep::comm

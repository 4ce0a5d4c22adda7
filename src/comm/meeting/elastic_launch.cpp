#include "elastic_launch.hpp"

#include <algorithm>
#include <optional>
#include <utility>

namespace lockstep::comm {

ElasticLaunch::ElasticLaunch(const StorePtr& store, std::string job, int processes, int restarts, const Limits& limits,
                             const Machines& machines)
    : store_(store),
      job_(std::move(job)),
      places_(processes / machines.nodes),
      first_nodes_(machines.nodes),
      generations_(store, job_),
      nodes_(store, job_, {places_, machines.most}, limits.agent_silence),
      restarts_left_(restarts),
      limits_(limits) {
  generations_.begin(processes);
  for (int place = 0; place < processes; ++place) members_.push_back({place, /*is_in=*/true});
}

std::vector<ElasticLaunch::Start> ElasticLaunch::begin() {
  begun_ = true;
  std::vector<Start> starts;
  for (int member = 0; member < static_cast<int>(members_.size()); ++member) starts.push_back(started(member));
  return starts;
}

ElasticLaunch::Start ElasticLaunch::started(int member) {
  const Start start{member, place_of(member), node_of(member)};
  members_[member].seen = Clock::now();
  nodes_.order(start.node, {.kind = Order::Kind::start, .member = member, .place = start.place});
  return start;
}

ElasticLaunch::Heard ElasticLaunch::hear() {
  auto news = nodes_.look();
  Heard heard{.ended = {}, .lost = {}, .came = std::move(news.came), .refused = std::move(news.refused)};
  for (const auto& [node, report] : news.ended) {
    const bool is_known = report.member >= 0 && report.member < static_cast<int>(members_.size());
    if (!is_known || node_of(report.member) != node || members_[report.member].has_ended) continue;
    if (std::find(news.lost.begin(), news.lost.end(), node) != news.lost.end()) continue;  // it counts as lost
    heard.ended.push_back(report);
  }
  for (const int node : news.lost) {
    heard.lost.push_back(lose_node(node, "its launcher gives no sign of life", heard.ended));
  }
  for (const auto& [node, code] : news.left) {
    heard.lost.push_back(lose_node(node, "its launcher has ended", heard.ended));
    heard.lost.back().code = code;
  }
  for (const int node : heard.came) {
    if (node < first_nodes_ || !later_nodes_.insert(node).second) continue;
    for (int place = node * places_; place < (node + 1) * places_; ++place) vacant_.push_back(place);
    restarts_left_ += places_;  // these are none
  }
  if (ended_with_) {  // who comes now is too late
    for (const int node : heard.came) nodes_.order(node, *ended_with_);
  }
  return heard;
}

bool ElasticLaunch::note_end(int member, const ProcessEnd& end, bool killed) {
  const bool is_loss = end.failed && (killed || !generations_.newest().index_of(member));
  has_failed_ = has_failed_ || (end.failed && !is_loss);
  has_lost_ = has_lost_ || is_loss;
  if (is_loss) lost_ = Clock::now();
  members_[member].has_ended = true;
  const auto now = is_loss ? generations_.lose({member}) : generations_.end();
  const auto kind = is_loss || !end.failed ? Failure::Kind::death
                    : end.stopped          ? Failure::Kind::stop
                                           : Failure::Kind::error;
  call_off_until(now, {"process " + std::to_string(member) + " of the job is gone: " + end.how, kind});
  if (is_loss && now.over) return is_dispensable(member, now);
  if (!is_loss || now.over) return false;
  if (!generations_.is_surplus(member)) vacate(member, end.lacked_memory);
  return true;
}

// Once the others of a training have come to their end: all but the first, which keeps the run's files, and may not be
// done with them.
bool ElasticLaunch::is_dispensable(int member, const Generation& last) {
  return takes_part() && !has_failed_ && !last.members.empty() && last.members.front() != member;
}

// But for those whose end was reported: they are given to note_end().
ElasticLaunch::Heard::LostNode ElasticLaunch::lose_node(int node, const std::string& how,
                                                        const std::vector<Report>& ended) {
  Heard::LostNode loss{.node = node, .members = {}, .go_on = true};
  if (!begun_) return loss;  // its processes have not started, and do so once it has come again
  for (int member = 0; member < static_cast<int>(members_.size()); ++member) {
    const auto is_its = [&](const Report& report) { return report.member == member; };
    if (node_of(member) != node || std::any_of(ended.begin(), ended.end(), is_its)) continue;
    if (!std::exchange(members_[member].has_ended, true)) loss.members.push_back(member);
  }
  if (loss.members.empty()) return loss;
  has_lost_ = true;
  lost_ = Clock::now();
  const auto before = generations_.newest();
  const auto now = generations_.lose(loss.members);
  call_off_until(now, {"node " + std::to_string(node) + " of the job is gone: " + how, Failure::Kind::death});
  const bool are_dispensable =
      std::all_of(loss.members.begin(), loss.members.end(), [&](int member) { return is_dispensable(member, now); });
  loss.go_on = takes_part() && (!now.over || (before.over && are_dispensable));
  if (now.over) return loss;
  restarts_left_ += static_cast<int>(loss.members.size());  // it is no restart if the machine comes again
  for (const int member : loss.members) vacate(member);
  return loss;
}

void ElasticLaunch::call_off_until(const Generation& now, const Failure& failure) {
  for (; called_off_ < now.number; ++called_off_) {
    call_off(store_, job_, called_off_, failure);
  }
}

// A successor needs as much memory. What lacked for a moment may be there again, so the first of a machine gets one.
// After that the machine has too little for so many processes, whichever of them the kernel kills.
void ElasticLaunch::vacate(int member, bool lacked_memory) {
  if (lacked_memory && !short_of_memory_.insert(node_of(member)).second) {
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
    if (!there(place / places_)) {
      vacant_.push_back(place);
      continue;
    }
    --restarts_left_;
    members_.push_back({place, /*is_in=*/false});
    starts.push_back(started(static_cast<int>(members_.size()) - 1));
  }
  return starts;
}

void ElasticLaunch::kill(int member) {
  nodes_.order(node_of(member), {.kind = Order::Kind::kill, .member = member});
}

void ElasticLaunch::end(int code, const std::string& why) {
  if (ended_with_) return;
  ended_with_ = Order{.kind = Order::Kind::over, .code = code, .why = why};
  nodes_.order_all(*ended_with_);
}

bool ElasticLaunch::some_run() const {
  return std::any_of(members_.begin(), members_.end(), [](const Member& member) { return !member.has_ended; });
}

// By node: after which its members count as dead. If one of a machine's processes beats late, or its agent does, the
// others may too.
std::vector<std::chrono::milliseconds> ElasticLaunch::silences(
    const std::vector<std::optional<Generations::Heart>>& hearts) const {
  std::vector<std::chrono::milliseconds> silences;
  for (int number = 0; number < static_cast<int>(hearts.size()); ++number) {
    const auto node = static_cast<size_t>(node_of(number));
    while (silences.size() <= node) {
      silences.push_back(std::max(looks_.limit(), nodes_.silence_limit(static_cast<int>(silences.size()))));
    }
    if (hearts[number]) silences[node] = std::max(silences[node], hearts[number]->silence);
  }
  return silences;
}

ElasticLaunch::Look ElasticLaunch::look() {
  const auto time = Clock::now();
  const auto since_last = time - std::exchange(looked_, time);
  looks_.beat(time);
  const auto now = generations_.newest();
  std::vector<std::optional<Generations::Heart>> hearts(members_.size());
  const auto count = static_cast<int>(members_.size());
  for (int number = 0; number < count; ++number) {  // all, before one of them is late
    Member& member = members_[number];
    if (member.has_ended) continue;
    hearts[number] = generations_.heart_of(number);
    if (hearts[number] && !std::exchange(member.has_begun, true))
      longest_start_ = std::max(longest_start_.value_or(Clock::duration()), time - member.seen);
  }
  const auto of_machines = silences(hearts);
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
    // Much of the silence between two looks: this process stood still (Ctrl-Z, a machine that was paused), and others
    // maybe too.
    const auto silence = heart ? std::min(of_machines[node_of(number)], heart->most) : limits_.until_first_beat;
    const bool stood_still = since_last > silence / 2;
    const bool machine_may_be_silent = nodes_.may_be_silent(node_of(number));
    if (beats || stood_still || machine_may_be_silent) member.seen = time;
    const bool is_late = !heart && longest_start_ &&
                         time - member.seen > std::max<Clock::duration>(limits_.until_first_beat, 2 * *longest_start_);
    const bool is_silent = heart && time - member.seen > silence;
    const bool is_dead = (was_in && !member.is_in) || is_silent;
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

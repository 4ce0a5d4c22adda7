#include "exchange.hpp"

#include <c10/core/InferenceMode.h>
#include <lockstep/base/error.hpp>

#include "comm/texts.hpp"

#include <algorithm>
#include <exception>
#include <iterator>

namespace lockstep::comm {

using Clock = std::chrono::steady_clock;

namespace {

// Ranks that all wait for each other are told so after this time, well before their timeout. Until then another thread
// of a rank (CUDA's backward has one) may still make the missing call.
constexpr std::chrono::milliseconds kStallGrace{500};

// A wait spins this long before it sleeps. Ranks that do equal work arrive within microseconds of each other, and
// waking a sleeper takes tens of them. But nobody else can use a core that spins.
constexpr std::chrono::microseconds kSpin{100};

void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

Exchange::Exchange(Devices devices, std::chrono::milliseconds timeout)
    : devices_(std::move(devices)),
      timeout_(timeout),
      can_spin_(static_cast<int>(devices_.size()) <= cpu_cores()),
      streams_(devices_),
      open_(devices_.size()),
      left_(devices_.size()),
      waiting_(devices_.size()) {}

std::string Exchange::name(int rank) const {
  return name_of(rank, devices_);
}

Exchange::Group& Exchange::group(const Members& members) {
  const Lock lock(mutex_);
  return groups_.try_emplace(members.name, members).first->second;
}

std::shared_ptr<Operation> Exchange::post(Group& group, int rank, Call call) {
  const Lock lock(mutex_);
  throw_if_ended(group.members.ranks[rank]);
  const uint64_t number = group.next_collective_[rank]++;
  auto& slot = group.collectives_[number];
  if (!slot) {
    slot = std::make_shared<Operation>(group.members, number);
  } else {
    const auto& other = *std::find_if(slot->members_.begin(), slot->members_.end(), [](auto& m) { return m.posted; });
    if (other.call.signature != call.signature) {
      const int here = slot->in_world(rank);
      const int there = slot->in_world(other.rank);
      fail(here, {text_of_different_calls(slot->title(), {name(there), other.call.signature.text()},
                                          {name(here), call.signature.text()}),
                  {Error::difference, {std::min(here, there), std::max(here, there)}}});
    }
  }
  const auto operation = slot;
  if (operation->posts_ + 1 == operation->members_.size()) group.collectives_.erase(number);
  join(operation, rank, std::move(call));
  return operation;
}

std::shared_ptr<Operation> Exchange::post_recv_any(Group& group, int rank, int tag, Call call) {
  const Lock lock(mutex_);
  throw_if_ended(group.members.ranks[rank]);
  auto oldest = group.messages_.end();
  const auto sent = [](const auto& place) { return place->second.front()->member(place->first.source).time; };
  for (auto place = group.messages_.begin(); place != group.messages_.end(); ++place) {
    const auto& [side, queue] = *place;
    if (side.destination != rank || side.tag != tag || queue.front()->member(rank).posted) continue;
    if (oldest == group.messages_.end() || sent(place) < sent(oldest)) oldest = place;
  }
  std::shared_ptr<Operation> operation;
  if (oldest != group.messages_.end()) {
    operation = oldest->second.front();
    oldest->second.pop_front();
    if (oldest->second.empty()) group.messages_.erase(oldest);
  } else {
    const Side side{kAnySource, rank, tag};
    operation = std::make_shared<Operation>(group.members, side);
    group.messages_[side].push_back(operation);
  }
  join(operation, rank, std::move(call));
  return operation;
}

std::shared_ptr<Operation> Exchange::post_message(Group& group, const Side& side, int rank, Call call) {
  const Lock lock(mutex_);
  throw_if_ended(group.members.ranks[rank]);
  const bool answered = group.messages_.count(side) > 0 || rank != side.source;
  const auto any = answered ? group.messages_.end() : group.messages_.find({kAnySource, side.destination, side.tag});
  if (any != group.messages_.end()) {
    const auto operation = any->second.front();
    any->second.pop_front();
    if (any->second.empty()) group.messages_.erase(any);
    operation->set_source(rank);
    join(operation, rank, std::move(call));
    return operation;
  }
  auto& queue = group.messages_[side];
  const auto open =
      std::find_if(queue.begin(), queue.end(), [&](const auto& message) { return !message->member(rank).posted; });
  std::shared_ptr<Operation> operation;
  if (open != queue.end()) {
    operation = *open;
    queue.erase(open);
  } else {
    operation = std::make_shared<Operation>(group.members, side);
    queue.push_back(operation);
  }
  if (queue.empty()) group.messages_.erase(side);
  join(operation, rank, std::move(call));
  return operation;
}

void Exchange::join(const std::shared_ptr<Operation>& joined, int rank, Call call) {
  Operation& operation = *joined;
  auto& member = operation.member(rank);
  const int here = operation.in_world(rank);
  if (devices_[here].is_cpu()) forget_complete(here, nullptr);  // a GPU's stream has to wait for them yet
  {
    const std::lock_guard lock(open_[here].mutex);
    open_[here].calls.push_back(joined);
  }
  member.ready = streams_.ready(devices_[here]);
  for (const auto& tensor : call.in) streams_.keep(tensor);
  for (const auto& tensor : call.out) streams_.keep(tensor);
  for (const auto& [to, from] : call.back) streams_.keep(to);
  member.call = std::move(call);
  member.time = Clock::now();
  member.posted = true;
  if (++operation.posts_ < operation.members_.size()) return;
  if (const auto& check = operation.members_[0].call.check) {
    if (const auto complaint = check(operation); !complaint.empty())
      fail(here, {operation.title() + ": " + complaint, {Error::difference}});
  }
  operation.posted_ = true;
  changed_.notify_all();
}

Exchange::Operations Exchange::before(const Operation* operation, int rank) {
  Operations earlier;
  const std::lock_guard lock(open_[rank].mutex);
  for (const auto& call : open_[rank].calls) {
    if (call.get() == operation) break;
    if (!call->complete_ || !devices_[rank].is_cpu()) earlier.push_back(call);
  }
  return earlier;
}

void Exchange::forget_complete(int rank, const Operation* last) {
  const std::lock_guard lock(open_[rank].mutex);
  auto& calls = open_[rank].calls;
  const auto found = std::find_if(calls.begin(), calls.end(), [&](const auto& call) { return call.get() == last; });
  const auto end = found == calls.end() ? found : found + 1;
  calls.erase(std::remove_if(calls.begin(), end, [](const auto& call) { return call->complete_.load(); }), end);
}

bool Exchange::is_held_up(const Operations& earlier) {
  return std::any_of(earlier.begin(), earlier.end(),
                     [](const auto& call) { return call->posted_ && !call->complete_ && !call->has_work(); });
}

bool Exchange::all_done(const Operations& earlier) {
  return std::all_of(earlier.begin(), earlier.end(),
                     [](const auto& call) { return call->complete_ || !call->posted_; });
}

void Exchange::complete(const Operations& earlier, int rank, std::chrono::milliseconds timeout) {
  for (const auto& call : earlier) {
    if (!call->posted_) continue;
    if (can_spin_ && !call->complete_) spin(*call, {});
    if (!call->complete_) sleep(*call, {}, call->of_.index_of(rank), timeout);
    streams_.wait(call->done_, devices_[rank]);
  }
}

bool Exchange::test(Operation& operation, int rank, std::chrono::milliseconds timeout) {
  const int here = operation.in_world(rank);
  const auto earlier = before(&operation, here);
  work(operation, earlier);
  if (operation.complete_ && all_done(earlier)) {
    complete(earlier, here, timeout);
    streams_.wait(operation.done_, devices_[here]);
    forget_complete(here, &operation);
    return true;
  }
  if (timeout <= std::chrono::milliseconds::zero()) timeout = timeout_;
  const bool late = Clock::now() >= operation.member(rank).time + timeout;
  if (failed_ || someone_left_ || late) {
    const Lock lock(mutex_);
    throw_if_failed(rank, operation);
    throw_if_left(rank, operation);
    if (late && !operation.complete_) fail_late(rank, operation, timeout);
  }
  return false;
}

void Exchange::wait(Operation& operation, int rank, std::chrono::milliseconds timeout) {
  if (timeout <= std::chrono::milliseconds::zero()) timeout = timeout_;
  const int here = operation.in_world(rank);
  const auto earlier = before(&operation, here);
  work(operation, earlier);
  if (can_spin_) spin(operation, earlier);
  if (!operation.complete_) sleep(operation, earlier, rank, timeout);
  complete(earlier, here, timeout);
  streams_.wait(operation.done_, devices_[here]);
  forget_complete(here, &operation);
}

void Exchange::spin(Operation& operation, const Operations& earlier) {
  const auto end = Clock::now() + kSpin;
  while (!operation.complete_ && !failed_ && Clock::now() < end) {
    for (int i = 0; i < 16 && !operation.complete_; ++i) {
      work(operation, earlier);
      pause();
    }
  }
}

void Exchange::sleep(Operation& operation, const Operations& earlier, int rank, std::chrono::milliseconds timeout) {
  const auto deadline = Clock::now() + timeout;
  Lock lock(mutex_);
  const int here = operation.in_world(rank);
  auto& waiting = waiting_[here];
  waiting.push_back(&operation);
  const auto not_waiting = [&](void*) { waiting.erase(std::find(waiting.begin(), waiting.end(), &operation)); };
  const std::unique_ptr<void, decltype(not_waiting)> guard(&waiting, not_waiting);

  while (!operation.complete_) {
    throw_if_failed(rank, operation);
    throw_if_left(rank, operation);
    if (operation.has_work() && !is_held_up(earlier)) {
      lock.unlock();
      work(operation, earlier);
      lock.lock();
      continue;
    }
    const bool was_stalled = stalled();
    const auto wake = was_stalled ? std::min(deadline, Clock::now() + kStallGrace) : deadline;
    if (changed_.wait_until(lock, wake) == std::cv_status::no_timeout || operation.complete_) continue;
    if (was_stalled && stalled()) {
      fail(here, {text_of_standstill(name(here) + " waits in " + operation.where(rank) + " for " + missing(operation)),
                  {Error::difference}});
    }
    if (Clock::now() >= deadline) fail_late(rank, operation, timeout);
  }
}

void Exchange::work(Operation& operation, const Operations& earlier) {
  if (!operation.has_work() && !operation.complete_) return;
  for (const auto& call : earlier) {
    if (!call->posted_) continue;
    work(*call);
    if (!call->complete_) return;
  }
  work(operation);
}

void Exchange::work(Operation& operation) {
  while (operation.has_work() && !failed_) {
    const int share = operation.next_share_++;
    if (share >= operation.shares()) return;
    try {
      const c10::InferenceMode mode;  // another rank's tensors may be of that mode
      run_share(operation, share);
    } catch (const std::exception& error) {
      end({operation.where(operation.members_[0].rank) + " failed: " + error.what(), {Error::machine}});
      return;
    }
    if (++operation.finished_shares_ == operation.shares()) finish(operation);
  }
}

void Exchange::run_share(Operation& operation, int share) {
  const auto& task = operation.members_[0].call.work;
  if (!task) return;
  if (streams_.empty()) return task(operation, share);
  std::vector<const ReadyMark*> marks;
  for (const auto& member : operation.members_) marks.push_back(&member.ready);
  streams_.run_after(marks, [&] { task(operation, share); });
}

void Exchange::finish(Operation& operation) {
  try {
    const c10::InferenceMode mode;
    streams_.run_after({}, [&] {
      for (const auto& member : operation.members_) {
        for (const auto& [to, from] : member.call.back) to.copy_(from, /*non_blocking=*/true);
      }
    });
    operation.done_ = streams_.done();
  } catch (const std::exception& error) {
    return end({operation.title() + " failed: " + error.what(), {Error::machine}});
  }
  operation.complete_ = true;
  // It is taken after complete_ is set: a rank that saw complete_ unset then sleeps already, and is woken.
  const Lock lock(mutex_);
  changed_.notify_all();
}

void Exchange::abort(int rank, const Failure& reason) {
  end(reason);
  leave(rank);
}

void Exchange::leave(int rank) {
  if (!failed_) complete(before(nullptr, rank), rank, timeout_);
  forget_complete(rank, nullptr);
  const Lock lock(mutex_);
  left_[rank] = true;
  someone_left_ = true;
  changed_.notify_all();
  if (std::find(left_.begin(), left_.end(), false) != left_.end()) return;
  // Calls that were open when a rank left may be complete by now. That rank's stream has not waited for them.
  for (int other = 0; other < static_cast<int>(left_.size()); ++other) {
    for (const auto& call : before(nullptr, other)) {
      if (call->complete_) streams_.wait(call->done_, devices_[other]);
    }
  }
  if (failure_.empty()) throw_if_unanswered(rank);
}

void Exchange::throw_if_unanswered(int rank) {
  std::shared_ptr<Operation> open;
  for (const auto& [name, group] : groups_) {
    if (!group.collectives_.empty()) open = group.collectives_.begin()->second;
    if (!group.messages_.empty()) open = group.messages_.begin()->second.front();
  }
  if (!open) return;
  const auto& asked = *std::find_if(open->members_.begin(), open->members_.end(), [](auto& m) { return m.posted; });
  fail(rank, {text_of_unanswered_call(name(open->in_world(asked.rank)), open->where(asked.rank), missing(*open)),
              {Error::difference, awaited(*open)}});
}

void Exchange::end(const Failure& failure) {
  const Lock lock(mutex_);
  set_failure(failure);
}

void Exchange::set_failure(const Failure& failure) {
  if (failure_.empty()) failure_ = failure;
  failed_ = true;
  changed_.notify_all();
}

void Exchange::fail(int rank, const Failure& reason) {
  set_failure(reason);
  throw Error(name(rank) + ": " + reason.text, reason.data);
}

void Exchange::throw_if_ended(int rank) const {
  if (!failure_.empty()) throw Error(name(rank) + ": " + failure_.text, failure_.data);
  if (left_[rank]) throw Error(text_of_ended_run(name(rank)));
}

void Exchange::throw_if_failed(int rank, const Operation& operation) const {
  if (failure_.empty()) return;
  throw Error(name(operation.in_world(rank)) + ": " + operation.where(rank) + " was ended: " + failure_.text,
              failure_.data);
}

void Exchange::fail_late(int rank, const Operation& operation, std::chrono::milliseconds timeout) {
  const int here = operation.in_world(rank);
  fail(here, {text_of_timeout(name(here), timeout, operation.where(rank), missing(operation)),
              {Error::late, awaited(operation)}});
}

void Exchange::throw_if_left(int rank, const Operation& operation) {
  const int here = operation.in_world(rank);
  for (const auto& member : operation.members_) {
    if (member.posted) continue;
    if (member.rank == kAnySource) return throw_if_all_left(rank, operation);
    const int there = operation.in_world(member.rank);
    if (!left_[there]) continue;
    fail(here, {text_of_return(name(there), name(here), operation.where(rank)), {Error::difference, {there}}});
  }
}

void Exchange::throw_if_all_left(int rank, const Operation& operation) {
  for (const int there : awaited(operation)) {
    if (!left_[there]) return;
  }
  const int here = operation.in_world(rank);
  fail(here, {"all other ranks returned without the message that " + name(here) +
                  " waits for: " + operation.where(rank) + ". Each recv needs a send",
              {Error::difference, awaited(operation)}});
}

std::vector<int> Exchange::awaited(const Operation& operation) const {
  std::vector<int> ranks;
  for (const auto& member : operation.members_) {
    if (member.posted) continue;
    if (member.rank != kAnySource) {
      ranks.push_back(operation.in_world(member.rank));
      continue;
    }
    const int receiver = operation.in_world(operation.members_[0].rank);
    std::copy_if(operation.of_.ranks.begin(), operation.of_.ranks.end(), std::back_inserter(ranks),
                 [&](int other) { return other != receiver; });
  }
  return ranks;
}

std::string Exchange::missing(const Operation& operation) const {
  std::string text;
  for (const int there : awaited(operation)) {
    if (!text.empty()) text += " and ";
    text += name(there);
    const auto& waits = waiting_[there];
    text += waits.empty() ? ", which has not made this call" : ", which waits in " + waits.back()->text_of(there);
  }
  return text.empty() ? "its work to be finished" : text;
}

bool Exchange::stalled() const {
  for (size_t rank = 0; rank < devices_.size(); ++rank) {
    if (left_[rank]) continue;
    const auto& waits = waiting_[rank];
    const bool stuck =
        !waits.empty() && std::all_of(waits.begin(), waits.end(), [](const auto* o) { return !o->posted_; });
    if (!stuck) return false;
  }
  return true;
}

}  // namespace lockstep::comm

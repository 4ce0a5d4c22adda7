#include "comm/exchange.hpp"

#include <lockstep/error.hpp>

#include "comm/world.hpp"

#include <algorithm>
#include <exception>
#include <numeric>

namespace lockstep::comm {
namespace {

using Clock = std::chrono::steady_clock;

// Ranks that all wait for each other are told so after this time, well before their timeout. It gives another thread of
// a rank (CUDA's backward runs on such) the chance to make the missing call.
constexpr std::chrono::milliseconds kStallGrace{500};

std::string seconds(std::chrono::milliseconds time) {
  std::string text = std::to_string(static_cast<double>(time.count()) / 1000);
  text.erase(text.find('.') + 2);
  return text + " s";
}

}  // namespace

Exchange::Exchange(Devices devices, std::chrono::milliseconds timeout)
    : devices_(std::move(devices)),
      timeout_(timeout),
      streams_(devices_),
      left_(devices_.size()),
      next_collective_(devices_.size()),
      waiting_(devices_.size()) {}

std::shared_ptr<Operation> Exchange::post(int rank, Call call) {
  const Lock lock(mutex_);
  throw_if_failed(rank, nullptr);
  const uint64_t number = next_collective_[rank]++;
  auto& slot = collectives_[number];
  if (!slot) {
    slot = std::make_shared<Operation>();
    slot->title_ = "collective call " + std::to_string(number);
    slot->members_.resize(devices_.size());
    std::iota(slot->members_.begin(), slot->members_.end(), 0);
  }
  const auto operation = slot;
  if (!operation->calls_.empty()) {
    const auto& [other, theirs] = *operation->calls_.begin();
    if (theirs.text != call.text) {
      fail(rank, "the ranks' calls differ at " + operation->title_ + ": " + name_of(other, devices_) + " called " +
                     theirs.text + ", " + name_of(rank, devices_) + " called " + call.text +
                     ". All ranks must make the same calls in the same order");
    }
  }
  join(*operation, rank, std::move(call));
  if (operation->posted()) collectives_.erase(number);
  return operation;
}

std::shared_ptr<Operation> Exchange::post_send(int rank, int destination, int tag, Call call) {
  return post_message({rank, destination, tag}, rank, std::move(call));
}

std::shared_ptr<Operation> Exchange::post_recv(int rank, int source, int tag, Call call) {
  return post_message({source, rank, tag}, rank, std::move(call));
}

std::shared_ptr<Operation> Exchange::post_message(Side side, int rank, Call call) {
  const Lock lock(mutex_);
  throw_if_failed(rank, nullptr);
  auto& queue = messages_[side];
  const auto open =
      std::find_if(queue.begin(), queue.end(), [&](const auto& message) { return !message->calls_.contains(rank); });
  std::shared_ptr<Operation> operation;
  if (open != queue.end()) {
    operation = *open;
    queue.erase(open);
  } else {
    const auto [source, destination, tag] = side;
    operation = std::make_shared<Operation>();
    operation->title_ =
        "message " + std::to_string(source) + " -> " + std::to_string(destination) + ", tag " + std::to_string(tag);
    operation->members_ = {std::min(source, destination), std::max(source, destination)};
    queue.push_back(operation);
  }
  if (queue.empty()) messages_.erase(side);
  join(*operation, rank, std::move(call));
  return operation;
}

void Exchange::join(Operation& operation, int rank, Call call) {
  operation.ready_.emplace(rank, streams_.ready(devices_[rank]));
  for (const auto& tensor : call.in) streams_.keep(tensor);
  for (const auto& tensor : call.out) streams_.keep(tensor);
  operation.calls_.emplace(rank, std::move(call));
  if (!operation.posted()) return;
  if (const auto& check = operation.calls_.begin()->second.check) {
    if (const auto complaint = check(operation); !complaint.empty()) fail(rank, operation.title_ + ": " + complaint);
  }
  changed_.notify_all();
}

bool Exchange::test(Operation& operation, int rank) {
  Lock lock(mutex_);
  if (!operation.complete_) throw_if_failed(rank, &operation);
  work(operation, lock);
  if (!operation.complete_) throw_if_failed(rank, &operation);
  if (operation.complete_) streams_.wait(operation.done_, devices_[rank]);
  return operation.complete_;
}

void Exchange::wait(Operation& operation, int rank, std::chrono::milliseconds timeout) {
  if (timeout <= std::chrono::milliseconds::zero()) timeout = timeout_;
  const auto deadline = Clock::now() + timeout;
  Lock lock(mutex_);
  work(operation, lock);
  auto& waiting = waiting_[rank];
  waiting.push_back(&operation);
  const auto not_waiting = [&](void*) { waiting.erase(std::find(waiting.begin(), waiting.end(), &operation)); };
  const std::unique_ptr<void, decltype(not_waiting)> guard(&waiting, not_waiting);

  while (!operation.complete_) {
    throw_if_failed(rank, &operation);
    for (const int member : operation.members_) {
      if (left_[member] && !operation.calls_.contains(member)) {
        fail(rank, name_of(member, devices_) + " returned without the call that " + name_of(rank, devices_) +
                       " waits for: " + operation.call(rank).text + " (" + operation.title_ +
                       "). All ranks must make the same calls");
      }
    }
    const bool was_stalled = stalled();
    const auto wake = was_stalled ? std::min(deadline, Clock::now() + kStallGrace) : deadline;
    if (changed_.wait_until(lock, wake) == std::cv_status::no_timeout || operation.complete_ || !failure_.empty()) {
      work(operation, lock);
    } else if (was_stalled && stalled()) {
      fail(rank, "the ranks wait for each other: " + name_of(rank, devices_) + " waits in " +
                     operation.call(rank).text + " (" + operation.title_ + ") for " + missing(operation) +
                     ". All ranks must make the same calls in the same order");
    } else if (Clock::now() >= deadline) {
      fail(rank, name_of(rank, devices_) + " waited " + seconds(timeout) + " in " + operation.call(rank).text + " (" +
                     operation.title_ + ") for " + missing(operation) + ". If that is no error, raise the timeout");
    }
  }
  streams_.wait(operation.done_, devices_[rank]);
}

void Exchange::work(Operation& operation, Lock& lock) {
  while (operation.posted() && operation.next_share_ < operation.shares() && failure_.empty()) {
    const int share = operation.next_share_++;
    std::vector<const ReadyMark*> marks;
    for (const auto& [rank, mark] : operation.ready_) marks.push_back(&mark);
    const auto& task = operation.calls_.begin()->second.work;
    lock.unlock();
    std::string complaint;
    try {
      if (task) streams_.run_after(marks, [&] { task(operation, share); });
    } catch (const std::exception& error) {
      complaint = error.what();
    }
    lock.lock();
    if (!complaint.empty() && failure_.empty()) {
      failure_ = operation.calls_.begin()->second.text + " (" + operation.title_ + ") failed: " + complaint;
      changed_.notify_all();
      return;
    }
    if (++operation.finished_shares_ == operation.shares()) finish(operation);
  }
}

void Exchange::finish(Operation& operation) {
  try {
    streams_.run_after({}, [&] {
      for (auto& [rank, call] : operation.calls_) {
        for (auto& [to, from] : call.back) to.copy_(from, /*non_blocking=*/true);
      }
    });
    operation.done_ = streams_.done();
    operation.complete_ = true;
  } catch (const std::exception& error) {
    failure_ = operation.title_ + " failed: " + error.what();
  }
  changed_.notify_all();
}

void Exchange::abort(int rank, const std::string& reason) {
  const Lock lock(mutex_);
  if (failure_.empty()) failure_ = reason;
  left_[rank] = true;
  changed_.notify_all();
}

void Exchange::leave(int rank) {
  const Lock lock(mutex_);
  left_[rank] = true;
  changed_.notify_all();
}

void Exchange::fail(int rank, const std::string& reason) {
  failure_ = reason;
  changed_.notify_all();
  throw Error(name_of(rank, devices_) + ": " + reason);
}

void Exchange::throw_if_failed(int rank, const Operation* operation) const {
  if (failure_.empty()) return;
  const std::string where = operation ? operation->call(rank).text + " (" + operation->title_ + ") was ended: " : "";
  throw Error(name_of(rank, devices_) + ": " + where + failure_);
}

std::string Exchange::missing(const Operation& operation) const {
  std::string text;
  for (const int member : operation.members_) {
    if (operation.calls_.contains(member)) continue;
    if (!text.empty()) text += " and ";
    text += name_of(member, devices_);
    const auto& waits = waiting_[member];
    text += waits.empty() ? ", which has not made this call" : ", which waits in " + waits.back()->call(member).text;
  }
  return text.empty() ? "its work to be finished" : text;
}

bool Exchange::stalled() const {
  for (size_t rank = 0; rank < devices_.size(); ++rank) {
    if (left_[rank]) continue;
    const auto& waits = waiting_[rank];
    const bool stuck =
        !waits.empty() && std::all_of(waits.begin(), waits.end(), [](const auto* o) { return !o->posted(); });
    if (!stuck) return false;
  }
  return true;
}

}  // namespace lockstep::comm

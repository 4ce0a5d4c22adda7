#include "waits.hpp"

#include <algorithm>
#include <utility>

namespace lockstep::comm {

uint64_t Waits::begin(Wait wait, std::function<void()> interrupt) {
  const std::lock_guard lock(mutex_);
  ++moves_;
  open_.emplace(next_id_, Open{std::move(wait), std::move(interrupt)});
  return next_id_++;
}

void Waits::end(uint64_t id) {
  const std::lock_guard lock(mutex_);
  ++moves_;
  open_.erase(id);
}

bool Waits::is_late(uint64_t id) const {
  const std::lock_guard lock(mutex_);
  return open_.at(id).wait.is_late();
}

void Waits::pass(Clock::duration most) {
  const auto now = Clock::now();
  const std::lock_guard lock(mutex_);
  for (auto& [id, open] : open_) {
    open.wait.waited += std::min(now - open.wait.since, most);
    open.wait.since = now;
  }
}

void Waits::note_return(int rank) {
  const std::lock_guard lock(mutex_);
  returned_.insert(rank);
}

void Waits::note_finish() {
  const std::lock_guard lock(mutex_);
  finishing_ = true;
}

Waits::Snapshot Waits::snapshot() const {
  const std::lock_guard lock(mutex_);
  Snapshot now{{}, returned_, moves_, searching_ > 0, finishing_};
  for (const auto& [id, open] : open_) now.open.push_back(open.wait);
  return now;
}

void Waits::fail(const Failure& failure) {
  if (failure.empty()) return;  // then the run had ended well before
  {
    const std::lock_guard lock(mutex_);
    if (failure_.empty()) failure_ = failure;
    failed_ = true;
    for (const auto& [id, open] : open_) {
      if (open.interrupt) open.interrupt();
    }
  }
  changed_.notify_all();
}

Failure Waits::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

void Waits::wake() {
  { const std::lock_guard lock(mutex_); }  // after this no sleep() is between the condition and the sleep
  changed_.notify_all();
}

void Waits::sleep(Clock::duration limit, const Condition& enough) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, limit, [&] { return enough(!failure_.empty()); });
}

void Waits::add_searching(int count) {
  const std::lock_guard lock(mutex_);
  searching_ += count;
}

}  // namespace lockstep::comm

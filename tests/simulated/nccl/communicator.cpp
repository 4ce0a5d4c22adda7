#include "communicator.hpp"

#include <utility>

#include "simulated/device/reports.hpp"

namespace simulated {
namespace {

struct Communicators {
  std::mutex mutex;
  std::vector<std::shared_ptr<Communicator>> all;

  static Communicators& get() {
    static auto* const communicators = new Communicators;  // streams' threads outlive main()
    return *communicators;
  }
};

}  // namespace

bool Communicator::join() {
  std::unique_lock lock(mutex_);
  ++joined_;
  changed_.notify_all();
  return changed_.wait_for(lock, kStuck, [this] { return joined_ >= size_; });
}

uint64_t Communicator::take_ticket(int rank) {
  return tickets_[static_cast<size_t>(rank)]++;
}

Communicator::End Communicator::meet(int rank, uint64_t ticket, const std::string& what, std::vector<View> in,
                                     std::vector<View> out, const std::function<void(Meeting&)>& work,
                                     std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  if (aborted_.contains(rank)) return End::aborted;
  Meeting& meeting = meetings_[ticket];
  if (meeting.arrived == 0) {
    meeting.what = what;
    meeting.in.resize(static_cast<size_t>(size_));
    meeting.out.resize(static_cast<size_t>(size_));
  }
  if (meeting.what != what) report("NCCL's kernels that meet differ: " + meeting.what + " and " + what);
  meeting.in[static_cast<size_t>(rank)] = std::move(in);
  meeting.out[static_cast<size_t>(rank)] = std::move(out);
  if (++meeting.arrived == size_) {
    work(meeting);
    meeting.done = true;
    changed_.notify_all();
    return End::met;
  }
  const auto over = [&] { return meeting.done || aborted_.contains(rank); };
  if (!changed_.wait_for(lock, timeout, over)) return End::late;
  return meeting.done ? End::met : End::aborted;
}

std::shared_ptr<Communicator> Communicator::pair(int low, int high) {
  const std::lock_guard lock(mutex_);
  auto& made = pairs_[{low, high}];
  if (!made) made = std::make_shared<Communicator>(2);
  return made;
}

void Communicator::abort(int rank) {
  const std::lock_guard lock(mutex_);
  aborted_.insert(rank);
  changed_.notify_all();
}

bool Communicator::is_aborted(int rank) {
  const std::lock_guard lock(mutex_);
  return aborted_.contains(rank);
}

std::string add_communicator(int size) {
  auto& [mutex, all] = Communicators::get();
  const std::lock_guard lock(mutex);
  all.push_back(std::make_shared<Communicator>(size));
  return std::to_string(all.size() - 1);
}

std::shared_ptr<Communicator> find_communicator(const std::string& number) {
  auto& [mutex, all] = Communicators::get();
  const std::lock_guard lock(mutex);
  return all.at(std::stoul(number));
}

}  // namespace simulated

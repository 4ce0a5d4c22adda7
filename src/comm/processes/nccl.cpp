// Ranks over c10d's NCCL, one communicator rank each: threads of one process find each other through a store in memory,
// processes through theirs.
#include <ATen/ops/zeros.h>
#include <lockstep/base/error.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "base/seconds.hpp"
#include "comm/group_member.hpp"
#include "comm/texts.hpp"
#include "comm/world.hpp"

#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <map>
#include <mutex>
#include <stop_token>
#include <thread>
#include <vector>

namespace lockstep::comm {
namespace {

using NcclPtr = c10::intrusive_ptr<c10d::ProcessGroupNCCL>;

constexpr std::chrono::milliseconds kBetweenLooks{1};
constexpr std::chrono::milliseconds kBetweenErrors{50};

NcclPtr make_backend(const GroupPlace& place, const c10::Device& device) {
  // At a timeout or an error of NCCL c10d's watchdog would end the process. In mode 2 it only aborts the communicator.
  setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2", /*overwrite=*/0);
  auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = place.timeout;
  options->is_high_priority_stream = true;  // or its kernels would queue behind compute
  auto backend = c10::make_intrusive<c10d::ProcessGroupNCCL>(place.store, place.rank, place.size, options);
  backend->setBoundDeviceId(device);
  return backend;
}

// Throws nothing: the run has failed already, for a reason that is known.
void abort_quietly(const NcclPtr& backend) noexcept {
  try {
    backend->abort();
  } catch (const std::exception&) {
    return;  // it took longer than c10d waits for it, or NCCL refused
  }
}

// NCCL knows neither a rank that does not come nor one that has failed. Its waits have no limit: on the host while a
// communicator is made or taken down, on the device within a call. So
//
// 1. a communicator is made when all of its ranks have come to it here, and before any of them makes a call;
// 2. it is taken down when all ranks of the world have left, and none of their calls waits any more;
// 3. a failure aborts every communicator, also one that is made meanwhile, and ends all waits here;
// 4. c10d's watchdog sees calls that take too long. A thread of the world looks for what it saw, which is a failure.
class NcclWorld : public World {
 public:
  NcclWorld(const Devices& devices, std::chrono::milliseconds timeout)
      : World(devices), timeout_(timeout), backends_(devices.size()), left_(devices.size(), false) {
    store_->setTimeout(timeout);
    watcher_ = std::jthread([this](const std::stop_token& stop) { watch(stop); });
  }

  c10::intrusive_ptr<c10d::Backend> backend(int rank, const Members& members) override {
    const auto store = c10::make_intrusive<c10d::PrefixStore>(members.name, store_);
    const auto backend = make_backend({store, members.index_of(rank), members.size(), timeout_}, devices()[rank]);
    meet(rank, members);
    backend->eagerConnectSingleDevice(devices()[rank]);
    bool failed = false;
    {
      const std::lock_guard lock(mutex_);
      backends_[rank].push_back(backend);
      failed = !failure_.empty();
    }
    if (failed) abort_quietly(backend);
    check(rank);
    return backend;
  }

  void check(int rank) override {
    look_for_errors(rank);
    const std::lock_guard lock(mutex_);
    if (!failure_.empty()) throw Error(name_of(rank, devices()) + ": " + failure_);
  }

  void abort(int /*rank*/, const Failure& reason) override { fail(reason.text); }

  void leave(int rank) override {
    {
      std::unique_lock lock(mutex_);
      left_[rank] = true;
      changed_.notify_all();
      changed_.wait(lock, [this] { return !failure_.empty() || std::ranges::find(left_, false) == left_.end(); });
    }
    check(rank);
    const auto own = backends_of(rank);
    for (const auto& backend : own) wait_for_calls(rank, backend);
    for (const auto& backend : own) backend->shutdown();
  }

 private:
  using Backends = std::vector<NcclPtr>;  // of the world and of groups

  Backends backends_of(int rank) {
    const std::lock_guard lock(mutex_);
    return backends_[rank];
  }

  // Invariant 1.
  void meet(int rank, const Members& members) {
    std::unique_lock lock(mutex_);
    auto& come = come_[members.name];
    ++come;
    changed_.notify_all();
    const auto all = [&] { return come == members.size(); };
    const auto gone = [&] { return std::ranges::find_if(members.ranks, [this](int other) { return left_[other]; }); };
    const bool in_time =
        changed_.wait_for(lock, timeout_, [&] { return all() || !failure_.empty() || gone() != members.ranks.end(); });
    if (all()) return;
    const std::string name = name_of(rank, devices());
    const std::string where = "connecting to " + std::to_string(members.size()) + " ranks over NCCL";
    if (!failure_.empty()) throw Error(name + ": " + where + " was ended: " + failure_);
    if (in_time) throw Error(text_of_return(name_of(*gone(), devices()), name, where));
    throw Error(text_of_timeout(name, timeout_, where, "a rank that did not come"));
  }

  // Invariant 2. A last call comes about when all calls before it have. Where one rank made a call that the others did
  // not, none of this would end.
  void wait_for_calls(int rank, const NcclPtr& backend) {
    std::vector<at::Tensor> nothing{at::zeros({1}, at::TensorOptions(devices()[rank]))};
    const auto work = backend->allreduce(nothing, {});
    for (const auto deadline = Clock::now() + timeout_; !work->isCompleted();) {
      check(rank);
      if (Clock::now() >= deadline) {
        throw Error(name_of(rank, devices()) + ": waited " + seconds(timeout_) +
                    " for calls that it made before it returned, and that other ranks did not make" + kSameCalls);
      }
      std::this_thread::sleep_for(kBetweenLooks);
    }
    check(rank);
  }

  // Invariant 3. An abort waits for what its communicator does, so none waits for another.
  void fail(const std::string& reason) {
    Backends all;
    {
      const std::lock_guard lock(mutex_);
      if (!failure_.empty()) return;
      failure_ = reason;
      for (const auto& of_rank : backends_) all.insert(all.end(), of_rank.begin(), of_rank.end());
    }
    changed_.notify_all();
    std::vector<std::jthread> aborts;
    for (const auto& backend : all) aborts.emplace_back([&backend] { abort_quietly(backend); });
  }

  // Invariant 4.
  void look_for_errors(int rank) {
    for (const auto& backend : backends_of(rank)) {
      const auto error = backend->getError();
      if (error == c10d::ErrorType::SUCCESS) continue;
      const std::string what = error == c10d::ErrorType::TIMEOUT
                                   ? "waited " + seconds(timeout_) + " in a call of NCCL" + kSameCallsInOrder
                                   : "NCCL failed; NCCL_DEBUG=WARN in the environment says more";
      fail(name_of(rank, devices()) + ": " + what);
    }
  }

  void watch(const std::stop_token& stop) {
    while (!stop.stop_requested()) {
      for (int rank = 0; rank < static_cast<int>(devices().size()); ++rank) look_for_errors(rank);
      std::this_thread::sleep_for(kBetweenErrors);
    }
  }

  using Clock = std::chrono::steady_clock;

  const std::chrono::milliseconds timeout_;
  c10::intrusive_ptr<c10d::HashStore> store_ = c10::make_intrusive<c10d::HashStore>();
  std::mutex mutex_;
  std::condition_variable changed_;  // what follows, which mutex_ guards
  std::vector<Backends> backends_;   // by rank
  std::map<std::string, int> come_;  // ranks that are in backend(), by the members' name
  std::vector<bool> left_;           // by rank
  std::string failure_;              // empty: none yet
  std::jthread watcher_;             // last, since it uses all of them
};

}  // namespace

GroupMember make_nccl_group(const GroupPlace& place, const c10::Device& device) {
  const auto backend = make_backend(place, device);
  return {backend, [backend] { abort_quietly(backend); }};
}

std::unique_ptr<World> make_nccl_world(const Devices& devices, std::chrono::milliseconds timeout) {
  return std::make_unique<NcclWorld>(devices, timeout);
}

}  // namespace lockstep::comm

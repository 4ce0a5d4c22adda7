// Ranks over c10d's NCCL, one communicator rank each: threads of one process find each other through a store in memory,
// processes through theirs.
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "comm/group_member.hpp"
#include "comm/world.hpp"

#include <mutex>
#include <vector>

namespace lockstep::comm {
namespace {

c10::intrusive_ptr<c10d::ProcessGroupNCCL> connect(const GroupPlace& place, const c10::Device& device) {
  auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = place.timeout;
  options->is_high_priority_stream = true;  // or its kernels would queue behind compute
  auto backend = c10::make_intrusive<c10d::ProcessGroupNCCL>(place.store, place.rank, place.size, options);
  backend->setBoundDeviceId(device);
  return backend;
}

class NcclWorld : public World {
 public:
  NcclWorld(const Devices& devices, std::chrono::milliseconds timeout)
      : World(devices), timeout_(timeout), backends_(devices.size()) {
    store_->setTimeout(timeout);
  }

  c10::intrusive_ptr<c10d::Backend> backend(int rank, const Members& members) override {
    const auto store = c10::make_intrusive<c10d::PrefixStore>(members.name, store_);
    auto backend = connect({store, members.index_of(rank), members.size(), timeout_}, devices()[rank]);
    const std::lock_guard lock(mutex_);
    backends_[rank].push_back(backend);
    return backend;
  }

  // NCCL's own waits end when their communicators are torn down.
  void abort(int, const Failure&) override {
    const std::lock_guard lock(mutex_);
    for (const auto& of_rank : backends_) {
      for (const auto& backend : of_rank) backend->abort();
    }
  }

  // Destroying a communicator waits for its pending work, so a rank takes down only its own.
  void leave(int rank) override {
    Backends of_rank;
    {
      const std::lock_guard lock(mutex_);
      of_rank.swap(backends_[rank]);
    }
    for (const auto& backend : of_rank) backend->shutdown();
  }

 private:
  using Backends = std::vector<c10::intrusive_ptr<c10d::ProcessGroupNCCL>>;  // of the world and of groups

  const std::chrono::milliseconds timeout_;
  c10::intrusive_ptr<c10d::HashStore> store_ = c10::make_intrusive<c10d::HashStore>();
  std::mutex mutex_;
  std::vector<Backends> backends_;  // by rank; guarded by mutex_
};

}  // namespace

GroupMember make_nccl_group(const GroupPlace& place, const c10::Device& device) {
  const auto backend = connect(place, device);
  return {backend, [backend] { backend->abort(); }};
}

std::unique_ptr<World> make_nccl_world(const Devices& devices, std::chrono::milliseconds timeout) {
  return std::make_unique<NcclWorld>(devices, timeout);
}

}  // namespace lockstep::comm

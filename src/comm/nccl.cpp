// Ranks as threads over c10d's NCCL: one communicator rank per thread, found through a store in memory.
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "comm/world.hpp"

#include <mutex>
#include <vector>

namespace lockstep::comm {
namespace {

class NcclWorld : public World {
 public:
  NcclWorld(const Devices& devices, std::chrono::milliseconds timeout)
      : devices_(devices), timeout_(timeout), backends_(devices.size()) {
    store_->setTimeout(timeout);
  }

  c10::intrusive_ptr<c10d::Backend> backend(int rank) override {
    auto options = c10d::ProcessGroupNCCL::Options::create();
    options->timeout = timeout_;
    auto backend =
        c10::make_intrusive<c10d::ProcessGroupNCCL>(store_, rank, static_cast<int>(devices_.size()), options);
    backend->setBoundDeviceId(devices_[rank]);
    const std::lock_guard lock(mutex_);
    backends_[rank] = backend;
    return backend;
  }

  // NCCL's own waits end when their communicators are torn down.
  void abort(int, const std::string&) override {
    const std::lock_guard lock(mutex_);
    for (const auto& backend : backends_) {
      if (backend) backend->abort();
    }
  }

  // Destroying a communicator waits for its pending work, so a rank takes down only its own.
  void leave(int rank) override {
    c10::intrusive_ptr<c10d::ProcessGroupNCCL> backend;
    {
      const std::lock_guard lock(mutex_);
      backend = std::move(backends_[rank]);
    }
    if (backend) backend->shutdown();
  }

 private:
  const Devices devices_;
  const std::chrono::milliseconds timeout_;
  c10::intrusive_ptr<c10d::HashStore> store_ = c10::make_intrusive<c10d::HashStore>();
  std::mutex mutex_;
  std::vector<c10::intrusive_ptr<c10d::ProcessGroupNCCL>> backends_;  // guarded by mutex_
};

}  // namespace

std::unique_ptr<World> make_nccl_world(const Devices& devices, std::chrono::milliseconds timeout) {
  return std::make_unique<NcclWorld>(devices, timeout);
}

}  // namespace lockstep::comm

// Labels: gpu
// No step makes the host wait for the GPU: an epoch of many steps has as many such waits as an epoch of few.
#include <c10/cuda/CUDAFunctions.h>
#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <torch/torch.h>

#include "devices/cuda_graph.hpp"
#include "trainer/rank_trainer.hpp"
#include "trainer/workload.hpp"

namespace host_waits_test {

using lockstep::Rank;
using lockstep::TrainOptions;

struct Counter : c10::WarningHandler {
  void process(const c10::Warning& warning) override { count += warning.msg().find("synchroniz") != std::string::npos; }
  int count = 0;
};

// LibTorch's waits for the GPU in rank 0's second epoch of `steps` full batches.
int waits(int64_t steps, bool graphed, const lockstep::Devices& devices) {
  TrainOptions options;
  options.on_nan = lockstep::OnNan::go_on;  // or the host waits in each step, to look at its gradients
  options.model.name = "mlp";
  options.batch.size = 8;
  options.devices = devices;
  const auto data = lockstep::synthetic_images(steps * options.batch.size, 8);
  int count = 0;
  lockstep::run(devices, [&](Rank& rank) {
    const lockstep::TrainCallbacks callbacks;
    lockstep::RankTrainer trainer(options, callbacks, task_of(options, data), rank, nullptr,
                                  graphed ? lockstep::make_cuda_graph() : nullptr);
    trainer.epoch(1);
    Counter counter;
    const c10::WarningUtils::WarningHandlerGuard guard(&counter);
    rank.barrier();
    if (rank.index() == 0) c10::cuda::warning_state().set_sync_debug_mode(c10::cuda::SyncDebugMode::L_WARN);
    rank.barrier();
    trainer.epoch(2);
    rank.barrier();
    if (rank.index() == 0) {
      c10::cuda::warning_state().set_sync_debug_mode(c10::cuda::SyncDebugMode::L_DISABLED);
      count = counter.count;
    }
  });
  return count;
}

TEST(HostWaits, ArePerEpochAndNotPerStep) {
  if (lockstep::gpus().empty()) GTEST_SKIP() << "LibTorch finds no GPU here";
  const c10::Device gpu("cuda:0");
  for (const auto& devices : {lockstep::Devices{gpu}, lockstep::Devices{gpu, gpu}}) {
    for (const bool graphed : {false, true}) {
      SCOPED_TRACE(testing::Message() << devices.size() << " ranks" << (graphed ? ", recorded steps" : ""));
      const int few = waits(6, graphed, devices);
      EXPECT_GT(few, 0);  // the epoch's totals are read
      EXPECT_EQ(waits(18, graphed, devices), few);
    }
  }
}

}  // namespace host_waits_test

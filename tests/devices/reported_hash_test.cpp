// Labels: gpu
// The hash that a run reports is that of its file. On an H200 a ResNet-18 with ZeRO on 3 and 5 ranks that shared the
// GPU sometimes reported another one (docs/results/2026-11-26-real-gpu.md). Here each tensor is read before the hash
// reads it and once more when the GPU has done all, so that a difference has a name. The linker puts probed_hash() in
// the place of weights_hash().
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/devices/device_info.hpp>
#include <lockstep/devices/devices.hpp>
#include <lockstep/models/models.hpp>
#include <lockstep/nn/weights.hpp>
#include <lockstep/trainer/fit.hpp>

#include "nn/module_state.hpp"
#include "support/scratch_folder.hpp"
#include "support/simulated_device.hpp"

#include <string>
#include <vector>

namespace reported_hash_test {

using torch::Tensor;

std::string weights_hash(const torch::nn::Module& net) asm(
    "__real__ZN8lockstep12weights_hashB5cxx11ERKN5torch2nn6ModuleE");
std::string probed_hash(const torch::nn::Module& net) asm(
    "__wrap__ZN8lockstep12weights_hashB5cxx11ERKN5torch2nn6ModuleE");

struct Probe {
  int64_t tensors = 0;  // the number of those on GPUs
  std::vector<std::string> differences;
};

Probe* probe = nullptr;  // the probe of the test that runs, in which one rank asks for hashes; null in other tests

void compare(const std::string& what, const Tensor& reading, const Tensor& later) {
  const Tensor differ = (reading != later).flatten().nonzero();
  if (differ.numel() == 0) return;
  probe->differences.push_back(c10::str(what, " had ", differ.numel(), " other values of ", later.numel(), ", from ",
                                        differ[0].item<int64_t>(), " to ", differ[-1].item<int64_t>()));
}

std::string probed_hash(const torch::nn::Module& net) {
  if (probe == nullptr) return weights_hash(net);
  struct Readings {
    std::string name;
    Tensor tensor, first, copy, second;
  };
  std::vector<Readings> all;
  for (const auto& [name, tensor] : lockstep::state_of(net)) {
    if (!tensor.is_cpu()) all.push_back({name, tensor, tensor.cpu(), tensor.clone(), tensor.cpu()});
  }
  const std::string hash = weights_hash(net);
  for (const auto& [name, tensor, first, copy, second] : all) {
    lockstep::synchronize(tensor.device());
    const Tensor last = tensor.cpu();
    compare(name + ", the first reading", first, last);
    compare(name + ", the copy on the device", copy.cpu(), last);
    compare(name + ", the second reading", second, last);
  }
  probe->tensors += static_cast<int64_t>(all.size());
  return hash;
}

TEST(ReportedHash, IsThatOfTheFile) {
  if (lockstep::gpus().empty()) GTEST_SKIP() << "LibTorch finds no GPU here";
  // On a simulated GPU less: there each value is computed on the host.
  const bool is_simulated = lockstep::simulated::is_there();
  const auto images = lockstep::synthetic_images(is_simulated ? 60 : 5120, 10);
  const auto net = [] { return lockstep::ResNet18(lockstep::ResNet18Options{.width = 0.125, .image_size = 14}); };
  const lockstep::Task task{.name = "images",
                            .module = net,
                            .criterion = torch::nn::functional::cross_entropy,
                            .train = {images.train},
                            .test = {images.test}};
  for (const int ranks : {3, 5}) {
    for (const auto stage : {lockstep::Sharded::state, lockstep::Sharded::gradients, lockstep::Sharded::parameters}) {
      const lockstep::ScratchFolder folder;
      Probe of_run;
      probe = &of_run;
      const auto result =
          lockstep::fit(task, {.devices = lockstep::Devices(ranks, c10::Device("cuda:0")),
                               .way = stage,
                               .batch = {.size = is_simulated ? 30 : 256, .grain = is_simulated ? 2 : 32},
                               .rate = {.lr = 0.1},
                               .epochs = is_simulated ? 2 : 10,
                               .keep = {.run_dir = folder.path()}});
      probe = nullptr;
      auto kept = net();
      lockstep::load_weights(folder / "model.safetensors", *kept);
      EXPECT_EQ(result.history.back().weights, weights_hash(*kept)) << ranks << " ranks";
      EXPECT_THAT(of_run.differences, testing::IsEmpty()) << ranks << " ranks";
      EXPECT_GT(of_run.tensors, 0);
    }
  }
}

}  // namespace reported_hash_test

// A training of random_training.hpp on any split of the net: what it gives, as bits.
#pragma once

#include <torch/torch.h>
#include <lockstep/data_parallel/optimizer.hpp>
#include <lockstep/split/split_model.hpp>

#include "random_training.hpp"
#include "small_nets.hpp"
#include "tensor_bits.hpp"
#include "test_devices.hpp"

#include <cstdint>
#include <string>

namespace lockstep {

// The whole net after two epochs on `devices`, as rank 0 has it: empty in a process without rank 0.
inline TensorBits train_split(const RandomTask& task, const Devices& devices, const ModelSplit& split, int zero_stage) {
  const Dataset data = random_samples(task.seed, task.count);
  TensorBits bits;
  run(devices,
      [&](Rank& rank) {
        const auto whole = rank.in_turn([&] { return random_net(task.seed); });
        DataParallelOptions options{.sharded = static_cast<Sharded>(zero_stage)};
        if (options.sharded == Sharded::parameters) options.units = {"in", "uneven"};
        SplitModel net(copy_of(whole), rank, split, options);
        Optimizer optimizer(net, maker_of(task));
        for (int epoch = 0; epoch < 2; ++epoch) {
          for (const auto& batch : batches(data.to(rank.device()),
                                           {.size = task.batch, .seed = task.seed, .epoch = epoch, .grain = task.grain},
                                           net.mesh().data())) {
            optimizer.zero_grad();
            net.loss(batch, torch::nn::functional::cross_entropy).backward();
            optimizer.step();
          }
        }
        torch::nn::Sequential all = copy_of(whole);
        all->to(rank.device());
        const auto parameters = net.whole();
        net.gather(all);
        if (rank.index() == 0) bits = tensor_bits(*all);
      },
      {.seed = task.seed});
  return bits;
}

// A text of some of these trainings' bits, with all stages of ZeRO that the split goes with. Empty in a process without
// rank 0.
inline std::string bits_of_random_nets(const Devices& devices, const ModelSplit& split) {
  std::string text;
  for (uint64_t seed = 1; seed <= 6; ++seed) {
    const RandomTask task = random_task(seed);
    const auto bits = train_split(task, devices, split, static_cast<int>(seed % (split.mesh.pipeline > 1 ? 3 : 4)));
    for (const auto& of_one : bits) text += to_string(task) + ": " + of_one + "\n";
  }
  return text;
}

}  // namespace lockstep

// A hook that averages as none does, and a net whose gradients a test gives, for tests of communication hooks.
#pragma once

#include <torch/torch.h>
#include <lockstep/data_parallel/communication_hook.hpp>
#include <lockstep/data_parallel/data_parallel.hpp>

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace lockstep {

struct PlainHook : CommunicationHook {
  Round average(const GradientBucket& bucket, Rank& rank) override {
    return {.work = CommunicationHook::post_allreduce(rank, bucket.flat, c10d::ReduceOp::AVG)};
  }
};

// Weights whose gradients are what backward_with() is given.
struct GivenWeights : torch::nn::Module {
  explicit GivenWeights(const std::vector<at::Tensor>& like) {
    for (const auto& tensor : like) {
      register_parameter("w" + std::to_string(parameters().size()), torch::zeros_like(tensor));
    }
  }
};

inline void backward_with(DataParallel<GivenWeights>& net, const std::vector<at::Tensor>& gradients) {
  net->zero_grad();
  net.backward_through([&] {
    const auto parameters = net->parameters();
    at::Tensor sum = torch::zeros({}, parameters[0].device());
    for (size_t i = 0; i < gradients.size(); ++i) {
      sum = sum + (parameters[i] * gradients[i].to(parameters[i].device())).sum();
    }
    sum.backward();
  });
}

inline DataParallelOptions with_hook(std::shared_ptr<CommunicationHook> hook, DataParallelOptions options = {}) {
  options.hook = std::move(hook);
  return options;
}

}  // namespace lockstep

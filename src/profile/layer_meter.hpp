// LayerMeter: measures the needs of each layer of a net on this rank's device: seconds, bytes, messages.
//
// It changes the net: gradients add up and running statistics move. Use it from one thread.
#pragma once

#include <torch/nn/modules/container/sequential.h>
#include <lockstep/data/data.hpp>
#include <lockstep/plan/model_profile.hpp>
#include <lockstep/profile/layer_profile.hpp>

#include <cstdint>
#include <string>
#include <vector>

#include "echo_backend.hpp"

namespace lockstep {

class LayerMeter {
 public:
  // `names` are the layers' names. With `echo` the net is a slice, and `echo` answers its exchanges. Put the sample on
  // the net's device.
  LayerMeter(torch::nn::Sequential net, std::vector<std::string> names, Batch sample, Criterion criterion,
             c10::intrusive_ptr<EchoBackend> echo = {});

  // Measures every layer, and last the criterion. Takes about `seconds`, or more if two sizes take longer. Throws
  // Error, which names the layer that fails.
  std::vector<LayerProfile> measure(double seconds);

  // Runs forward, loss and backward of so many samples, as training does, and returns their times.
  struct StepTimes {
    double forward = 0;
    double backward = 0;
  };
  StepTimes step(int64_t samples);

 private:
  using Messages = std::vector<LayerMessage>;
  struct Exchanges {
    std::vector<Messages> forward, backward;  // the exchanges of each layer
  };

  at::Tensor call(size_t layer, const at::Tensor& x, int64_t samples);
  double now() const;
  template <class Action>
  double seconds_of(const Action& action);
  void step_by_layers(int64_t samples, std::vector<StepTimes>& times, Exchanges* exchanges = nullptr,
                      std::vector<double>* workspaces = nullptr);
  double add_point(int64_t samples, double seconds, std::vector<LayerProfile>& profiles);
  std::vector<double> workspaces(int64_t samples);
  void count_bytes(std::vector<LayerProfile>& profiles);
  void count_messages(std::vector<LayerProfile>& profiles);

  torch::nn::Sequential net_;
  const std::vector<std::string> names_;
  const Batch sample_;
  const Criterion criterion_;
  const c10::intrusive_ptr<EchoBackend> echo_;
  const bool on_one_thread_;  // the device is the CPU, and the rank has one intra-op thread
  int64_t smallest_ = 1;      // the smallest number of samples that the net takes
};

}  // namespace lockstep

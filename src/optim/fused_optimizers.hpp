// Makes SGD, Adam and AdamW whose step is one call of LibTorch's fused kernel for all parameters of a group.
//
// torch::optim's C++ optimizers call up to 14 operators for each parameter; on a GPU each is a kernel. These classes
// have the same groups, options, states, save() and load(). So states and checkpoints of one fit the other. Results are
// equal but for rounding: a fused kernel rounds once where operators round one after the other. A step that the kernels
// cannot take is LibTorch's own: sparse gradients, amsgrad, several types or devices in one group, and tensors that lie
// in memory otherwise than their gradients. Use an optimizer from one thread. It waits for no GPU.
#pragma once

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include "device_numbers.hpp"

#include <memory>
#include <optional>
#include <set>
#include <utility>
#include <vector>

namespace lockstep {

// Sets gradients to zero in one call, and in place: a CUDA graph and DataParallel's buckets rely on their memory.
void zero_gradients(const std::vector<at::Tensor>& parameters);

// Fused is the part that the three share. A step has two halves, so that a graph can hold the second one: on a GPU the
// learning rate and the counts of steps are tensors there, which the first half writes where the host has others.
class Fused {
 public:
  virtual ~Fused() = default;

  // Does the first half of a step that will have gradients of the same parameters as the last one, which kernels did.
  // Then step(), recorded, does the second half alone; later a graph does it, and after_replay() says so. step() throws
  // Error if it has gradients of other parameters. Steps without a graph may come in between.
  void before_replay();
  void after_replay() { is_prepared_ = false; }
  bool can_be_recorded() const;  // tells whether kernels did the last step, by numbers on the device

  // Held is what a recorded step holds of its optimizer. held() gives it right after a recording. has() tells whether
  // it still counts: options may change, and load() makes other tensors. Then forget_recorded_step(), and record anew.
  struct Held {
    std::vector<std::unique_ptr<torch::optim::OptimizerOptions>> options = {};  // options by group
    std::vector<at::Tensor> states = {};                                        // states of the parameters
  };
  Held held() const;
  bool has(const Held& held) const;  // learning rates do not count
  void forget_recorded_step() { recorded_.clear(); }

  // A recorded step claims its optimizer, of which no other one may be the recorder. Returns false if there is one.
  bool claim() { return !std::exchange(is_claimed_, true); }
  void release() { is_claimed_ = false; }

  // Lets kernels on a GPU leave everything as it was where `found`, float [1], is 1; the host counts the step
  // nevertheless. Undefined: they never do. If the run goes on after such a step, set `goes_on`, and call forget_step()
  // for each when the host knows of it.
  void skip_where(const at::Tensor& found, bool goes_on) {
    found_ = found;
    goes_on_ = goes_on;
  }
  void forget_step();

 protected:
  struct Stepped {  // a parameter, and the number of its group
    size_t group;
    at::Tensor parameter;
  };
  virtual const std::vector<torch::optim::OptimizerParamGroup>& groups() const = 0;
  virtual bool are_equal(const torch::optim::OptimizerOptions& a, const torch::optim::OptimizerOptions& b) const = 0;
  virtual std::vector<at::Tensor> states_of(const std::vector<Stepped>& all) const = 0;
  virtual bool fits() const = 0;                            // tells whether the kernels can take the groups
  virtual void count(const std::vector<Stepped>& all) = 0;  // makes states, and counts
  virtual void queue(const std::vector<Stepped>& all) = 0;
  virtual void uncount(const std::vector<Stepped>& all) = 0;

  // Does what is left of the step. Returns false, and does nothing, if the kernels cannot.
  bool step_by_kernels();
  std::optional<at::Tensor> found() const { return found_.defined() ? std::optional(found_) : std::nullopt; }
  bool counts_back() const { return found_.defined() && goes_on_; }

  DeviceNumbers numbers_;

 private:
  at::Tensor found_;
  bool goes_on_ = false;
  const std::vector<Stepped>& replayed() const { return recorded_.empty() ? last_ : recorded_; }

  std::vector<Stepped> last_;      // the parameters of the last step without a graph
  std::vector<Stepped> recorded_;  // the parameters of a recorded step; empty: there is none
  bool by_kernels_ = false;
  bool is_prepared_ = false;
  bool is_claimed_ = false;
};

class FusedSgd : public torch::optim::SGD, public Fused {
 public:
  using torch::optim::SGD::SGD;
  torch::Tensor step(LossClosure closure = nullptr) override;

 private:
  const std::vector<torch::optim::OptimizerParamGroup>& groups() const override { return param_groups_; }
  bool are_equal(const torch::optim::OptimizerOptions& a, const torch::optim::OptimizerOptions& b) const override {
    return static_cast<const torch::optim::SGDOptions&>(a) == static_cast<const torch::optim::SGDOptions&>(b);
  }
  std::vector<at::Tensor> states_of(const std::vector<Stepped>& all) const override;
  bool fits() const override;
  void count(const std::vector<Stepped>& all) override;
  void queue(const std::vector<Stepped>& all) override;
  void uncount(const std::vector<Stepped>&) override {}  // it counts nothing

  std::set<const c10::TensorImpl*> fresh_;  // parameters whose momentum begins with this step
};

// Base is torch::optim::Adam or AdamW, with its types of options and states.
template <class Base, class Options, class State>
class FusedAdamOf : public Base, public Fused {
 public:
  using Base::Base;
  torch::Tensor step(torch::optim::Optimizer::LossClosure closure = nullptr) override;

 private:
  const std::vector<torch::optim::OptimizerParamGroup>& groups() const override { return this->param_groups_; }
  bool are_equal(const torch::optim::OptimizerOptions& a, const torch::optim::OptimizerOptions& b) const override {
    return static_cast<const Options&>(a) == static_cast<const Options&>(b);
  }
  std::vector<at::Tensor> states_of(const std::vector<Stepped>& all) const override;
  bool fits() const override;
  void count(const std::vector<Stepped>& all) override;
  void queue(const std::vector<Stepped>& all) override;
  void uncount(const std::vector<Stepped>& all) override;
};

using FusedAdam = FusedAdamOf<torch::optim::Adam, torch::optim::AdamOptions, torch::optim::AdamParamState>;
using FusedAdamW = FusedAdamOf<torch::optim::AdamW, torch::optim::AdamWOptions, torch::optim::AdamWParamState>;

}  // namespace lockstep

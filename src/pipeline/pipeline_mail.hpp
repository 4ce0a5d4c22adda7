// PipelineMail: sends and receives a rank's PipelineMessages while it computes, as tensors over the rank's backend.
//
// Used by the rank's thread. Receives are posted a step before they are needed. So a message arrives while the rank
// computes: between processes, and on a GPU, where a call begins once all is done that was queued before it. If the
// order of posts matters (NCCL runs a rank's calls one after the other), everything is posted in the one order of
// PipelineMessages. There a receive that comes behind a message of the step before is posted after that one.
#pragma once

#include <ATen/core/Tensor.h>
#include <lockstep/ranks/rank.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "pipeline_messages.hpp"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

namespace lockstep {

// Tags of a pipeline's messages. They are the highest ones, so that others can count from 0.
enum PipelineTag { kTieTag = 32763, kActivationTag, kGradientTag, kLossTag, kShapeTag };

class PipelineMail {
 public:
  // `empty(message)` makes a contiguous tensor for a message that the rank receives. `messages` must outlive the mail.
  using Empty = std::function<at::Tensor(const PipelineMessage& message)>;
  PipelineMail(Rank& rank, const PipelineMessages& messages, Empty empty, bool in_order);

  // Gives what the rank's step `step` needs from another stage; undefined if nothing. Call it for every step in order.
  at::Tensor take(int step);
  // Hands on what step `step` has made for another stage, contiguous in the memory format that its receiver expects. Do
  // not change the tensor afterwards. A stage of this rank gets a copy.
  void give(int step, const at::Tensor& tensor);
  // The same for the gradients of ties, after take() or give() of the step. take_ties() gives them in the order of the
  // ties.
  std::vector<std::pair<int, at::Tensor>> take_ties(int step);  // with each tie's number
  void give_tie(int step, int tie, const at::Tensor& gradient);
  // Waits until all that was given has arrived.
  void finish();

 private:
  struct Open {
    at::Tensor tensor;
    c10::intrusive_ptr<c10d::Work> work;
  };

  void give_message(int message, const at::Tensor& tensor);
  int counterpart_of(const PipelineMessage& sent) const;  // what this rank receives of itself
  int last_needed(size_t step) const;                     // in the one order; -1: nothing
  void post(int message);
  void post_up_to(int message);       // in the one order
  void post_receive_of(size_t step);  // in it too, unless something that is not made yet comes before
  void wait(int message);

  Rank rank_;
  const PipelineMessages& messages_;
  const Empty empty_;
  const bool in_order_;
  std::vector<Open> open_;  // by message
  int next_message_ = 0;    // in order: all messages before it are posted
  size_t next_step_ = 0;    // out of order: all that the steps before it need is posted
};

// Some numbers from one rank to all others, which expect them while they compute.
class Announcement {
 public:
  // With `early` the others post their receives at once. Do not use it where the order of posts matters.
  Announcement(Rank& rank, int speaker, int64_t count, bool early);

  // Called by all ranks; `numbers`, `count` doubles on the rank's device, are the speaker's and ignored on the others.
  // Returns them. On a GPU the host does not wait for them.
  at::Tensor exchange(const at::Tensor& numbers);

 private:
  void post_receive();

  Rank rank_;
  const int speaker_;
  const int64_t count_;
  std::vector<at::Tensor> received_;
  c10::intrusive_ptr<c10d::Work> receive_;
};

}  // namespace lockstep

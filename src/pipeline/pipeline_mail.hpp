// PipelineMail: sends and receives a rank's PipelineMessages while it computes, as tensors over the rank's backend.
//
// Use it on the rank's thread. Receives are posted a step before they are needed, so that a message arrives while the
// rank computes. This counts between processes, and on a GPU, where a call begins once all work queued before it is
// done. If the order of posts matters (NCCL runs a rank's calls one after the other), everything is posted in the one
// order of PipelineMessages. Then a receive that comes after a message of the step before is posted after that message.
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

// These are the tags of a pipeline's messages: the highest ones, so that others can count from 0.
enum PipelineTag { kTieTag = 32763, kActivationTag, kGradientTag, kLossTag, kShapeTag };

class PipelineMail {
 public:
  // `empty(message)` makes a contiguous tensor for a message that the rank receives. Keep `messages` alive longer than
  // the mail.
  using Empty = std::function<at::Tensor(const PipelineMessage& message)>;
  PipelineMail(Rank& rank, const PipelineMessages& messages, Empty empty, bool in_order);

  // Gives the tensor that the rank's step `step` needs from another stage; undefined if it needs none. Call it for
  // every step in order.
  at::Tensor take(int step);
  // Sends the tensor that step `step` has made for another stage. Pass the tensor contiguous in the memory format that
  // the receiver expects, and do not change it afterwards. A stage of this rank gets a copy.
  void give(int step, const at::Tensor& tensor);
  // These do the same for the gradients of ties. Call them after take() or give() of the step. take_ties() gives the
  // gradients in the order of the ties.
  std::vector<std::pair<int, at::Tensor>> take_ties(int step);  // gives each with its tie's number
  void give_tie(int step, int tie, const at::Tensor& gradient);
  // Waits until all tensors that were given have arrived.
  void finish();

 private:
  struct Open {
    at::Tensor tensor;
    c10::intrusive_ptr<c10d::Work> work;
  };

  void give_message(int message, const at::Tensor& tensor);
  int counterpart_of(const PipelineMessage& sent) const;  // gives the receive of a message to this rank itself
  int last_needed(size_t step) const;  // gives the step's last needed message in the one order; -1: none
  void post(int message);
  void post_up_to(int message);       // posts in the one order, up to this message
  void post_receive_of(size_t step);  // posts the step's receive too, unless a message before it is not made yet
  void wait(int message);

  Rank rank_;
  const PipelineMessages& messages_;
  const Empty empty_;
  const bool in_order_;
  std::vector<Open> open_;  // open messages by number
  int next_message_ = 0;    // the next message, with in_order_: all before it are posted
  size_t next_step_ = 0;    // the next step, without: all messages that steps before it need are posted
};

// Sends some numbers from one rank to all others while these compute.
class Announcement {
 public:
  // With `early` the others post their receives at once. Do not use it where the order of posts matters.
  Announcement(Rank& rank, int speaker, int64_t count, bool early);

  // Call this on all ranks. `numbers` are `count` doubles on the rank's device; only the speaker's are read. Returns
  // the speaker's numbers. On a GPU the host does not wait for them.
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

#include "pipeline_mail.hpp"

#include <ATen/ops/empty.h>

#include <utility>

namespace lockstep {

namespace {

// The same memory with its values in a row, as NCCL needs it.
at::Tensor in_a_row(const at::Tensor& tensor) {
  const bool pixel_by_pixel = !tensor.is_contiguous() && tensor.is_contiguous(at::MemoryFormat::ChannelsLast);
  return pixel_by_pixel ? tensor.permute({0, 2, 3, 1}) : tensor;
}

}  // namespace

PipelineMail::PipelineMail(Rank& rank, const PipelineMessages& messages, std::function<at::Tensor(int step)> empty,
                           bool in_order)
    : rank_(rank),
      messages_(messages),
      empty_(std::move(empty)),
      in_order_(in_order),
      open_(messages.messages.size()) {}

at::Tensor PipelineMail::take(int step) {
  const int needed = messages_.needed[step];
  if (in_order_) {
    if (needed >= 0) post_up_to(needed);
    post_receive_of(static_cast<size_t>(step) + 1);
  } else {
    for (; next_step_ < messages_.needed.size() && next_step_ <= static_cast<size_t>(step) + 1; ++next_step_) {
      if (messages_.needed[next_step_] >= 0) post(messages_.needed[next_step_]);
    }
  }
  if (needed < 0) return {};
  at::Tensor tensor = open_[needed].tensor;
  wait(needed);
  for (const int sent : messages_.arrived[step]) wait(sent);
  return tensor;
}

void PipelineMail::give(int step, const at::Tensor& tensor) {
  const int made = messages_.made[step];
  const auto& message = messages_.messages[made];
  if (message.peer == rank_.index()) {
    open_[messages_.needed[message.their_step]].tensor = tensor.clone();
    return;
  }
  open_[made].tensor = tensor;
  if (in_order_) {
    post_up_to(made);
  } else {
    post(made);
  }
}

void PipelineMail::finish() {
  for (size_t message = 0; message < open_.size(); ++message) wait(static_cast<int>(message));
}

void PipelineMail::post(int index) {
  const auto& message = messages_.messages[index];
  if (message.peer == rank_.index()) return;  // given straight
  Open& open = open_[index];
  const int tag = message.kind == PipelineStep::Kind::forward ? kActivationTag : kGradientTag;
  if (!message.sent) open.tensor = empty_(message.step);
  std::vector<at::Tensor> tensors{in_a_row(open.tensor)};
  open.work = message.sent ? rank_.backend().send(tensors, message.peer, tag)
                           : rank_.backend().recv(tensors, message.peer, tag);
}

void PipelineMail::post_up_to(int message) {
  for (; next_message_ <= message; ++next_message_) post(next_message_);
}

void PipelineMail::post_receive_of(size_t step) {
  const int needed = step < messages_.needed.size() ? messages_.needed[step] : -1;
  for (int i = next_message_; i <= needed; ++i) {
    const auto& message = messages_.messages[i];
    if (message.sent && message.peer != rank_.index()) return;
  }
  post_up_to(needed);
}

void PipelineMail::wait(int message) {
  Open open = std::exchange(open_[message], {});
  if (open.work) open.work->wait();
}

Announcement::Announcement(Rank& rank, int speaker, int64_t count, bool early)
    : rank_(rank), speaker_(speaker), count_(count) {
  if (early && rank_.index() != speaker_) post_receive();
}

void Announcement::post_receive() {
  received_ = {at::empty({count_}, at::TensorOptions(rank_.device()).dtype(at::kDouble))};
  receive_ = rank_.backend().recv(received_, speaker_, kLossTag);
}

at::Tensor Announcement::exchange(const at::Tensor& numbers) {
  if (rank_.index() != speaker_) {
    if (!receive_) post_receive();
    receive_->wait();
    return received_[0];
  }
  std::vector<at::Tensor> said{numbers};
  std::vector<c10::intrusive_ptr<c10d::Work>> sends;
  for (int other = 0; other < rank_.world_size(); ++other) {
    if (other != speaker_) sends.push_back(rank_.backend().send(said, other, kLossTag));
  }
  for (const auto& send : sends) send->wait();
  return numbers;
}

}  // namespace lockstep

#include "pipeline_mail.hpp"

#include <ATen/ops/empty.h>

#include <algorithm>

namespace lockstep {

namespace {

// Gives the same memory with its values in a row, since NCCL needs that.
at::Tensor in_a_row(const at::Tensor& tensor) {
  const bool pixel_by_pixel = !tensor.is_contiguous() && tensor.is_contiguous(at::MemoryFormat::ChannelsLast);
  return pixel_by_pixel ? tensor.permute({0, 2, 3, 1}) : tensor;
}

}  // namespace

PipelineMail::PipelineMail(Rank& rank, const PipelineMessages& messages, Empty empty, bool in_order)
    : rank_(rank),
      messages_(messages),
      empty_(std::move(empty)),
      in_order_(in_order),
      open_(messages.messages.size()) {}

at::Tensor PipelineMail::take(int step) {
  const int needed = messages_.needed[step];
  if (in_order_) {
    post_up_to(last_needed(static_cast<size_t>(step)));
    post_receive_of(static_cast<size_t>(step) + 1);
  } else {
    for (; next_step_ < messages_.needed.size() && next_step_ <= static_cast<size_t>(step) + 1; ++next_step_) {
      if (messages_.needed[next_step_] >= 0) post(messages_.needed[next_step_]);
      for (const int tie : messages_.ties_needed[next_step_]) post(tie);
    }
  }
  if (needed < 0) return {};
  at::Tensor tensor = open_[needed].tensor;
  wait(needed);
  for (const int sent : messages_.arrived[step]) wait(sent);
  return tensor;
}

void PipelineMail::give(int step, const at::Tensor& tensor) {
  give_message(messages_.made[step], tensor);
}

std::vector<std::pair<int, at::Tensor>> PipelineMail::take_ties(int step) {
  std::vector<std::pair<int, at::Tensor>> gradients;
  for (const int needed : messages_.ties_needed[step]) {
    gradients.emplace_back(messages_.messages[needed].tie, open_[needed].tensor);
    wait(needed);
  }
  std::sort(gradients.begin(), gradients.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  return gradients;
}

void PipelineMail::give_tie(int step, int tie, const at::Tensor& gradient) {
  for (const int made : messages_.ties_made[step]) {
    if (messages_.messages[made].tie == tie) give_message(made, gradient);
  }
}

int PipelineMail::counterpart_of(const PipelineMessage& sent) const {
  if (sent.tie < 0) return messages_.needed[sent.their_step];
  const auto& needed = messages_.ties_needed[sent.their_step];
  return *std::find_if(needed.begin(), needed.end(),
                       [&](int index) { return messages_.messages[index].tie == sent.tie; });
}

void PipelineMail::give_message(int made, const at::Tensor& tensor) {
  const auto& message = messages_.messages[made];
  if (message.peer == rank_.index()) {
    open_[counterpart_of(message)].tensor = tensor.clone();
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
  if (message.peer == rank_.index()) return;  // give_message() has given it directly
  Open& open = open_[index];
  const int tag = message.tie >= 0                              ? kTieTag
                  : message.kind == PipelineStep::Kind::forward ? kActivationTag
                                                                : kGradientTag;
  if (!message.sent) open.tensor = empty_(message);
  std::vector<at::Tensor> tensors{in_a_row(open.tensor)};
  open.work = message.sent ? rank_.backend().send(tensors, message.peer, tag)
                           : rank_.backend().recv(tensors, message.peer, tag);
}

int PipelineMail::last_needed(size_t step) const {
  int last = messages_.needed[step];
  for (const int tie : messages_.ties_needed[step]) last = std::max(last, tie);
  return last;
}

void PipelineMail::post_up_to(int message) {
  for (; next_message_ <= message; ++next_message_) post(next_message_);
}

void PipelineMail::post_receive_of(size_t step) {
  const int needed = step < messages_.needed.size() ? last_needed(step) : -1;
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

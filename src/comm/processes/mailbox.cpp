#include "mailbox.hpp"

#include <ATen/ops/empty.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "comm/peer_lost.hpp"
#include "comm/sigpipe_blocked.hpp"
#include "gloo_reduction.hpp"

#include <exception>
#include <utility>

namespace lockstep::comm {
class Mailbox::NextMessage : public c10d::Work {
 public:
  NextMessage(std::shared_ptr<Mailbox> mailbox, std::shared_ptr<Receive> receive)
      : mailbox_(std::move(mailbox)), receive_(std::move(receive)) {}

  bool isCompleted() override { return false; }  // known in wait() alone, as of Gloo's messages
  bool wait(std::chrono::milliseconds timeout) override { return mailbox_->take(*receive_, timeout); }
  void abort() override { mailbox_->interrupt(); }
  int sourceRank() const override { return receive_->source; }

 private:
  const std::shared_ptr<Mailbox> mailbox_;
  const std::shared_ptr<Receive> receive_;
};

Mailbox::Mailbox(c10::intrusive_ptr<c10d::Backend> backend, int64_t bytes, int tag, std::function<size_t()> lost_count)
    : backend_(std::move(backend)), tag_(tag), lost_count_(std::move(lost_count)), peers_(backend_->getSize()) {
  for (int rank = 0; rank < backend_->getSize(); ++rank) {
    if (rank == backend_->getRank()) continue;
    peers_[rank].message = at::empty({bytes}, at::kByte);
    post(rank);
    peers_[rank].listener = std::thread([this, rank] { listen(rank); });
  }
}

Mailbox::~Mailbox() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
    for (auto& peer : peers_) {
      if (peer.work) peer.work->abort();
    }
  }
  changed_.notify_all();
  for (auto& peer : peers_) {
    if (peer.listener.joinable()) peer.listener.join();
  }
}

c10::intrusive_ptr<c10d::Work> Mailbox::receive(at::Tensor to) {
  receives_.push_back(std::make_shared<Receive>(Receive{std::move(to)}));
  return c10::make_intrusive<NextMessage>(shared_from_this(), receives_.back());
}

void Mailbox::post(int rank) {
  try {
    const SigpipeBlocked sigpipe_blocked;
    std::vector<at::Tensor> message{peers_[rank].message};
    auto work = backend_->recv(message, rank, tag_);
    const std::lock_guard lock(mutex_);
    peers_[rank].work = std::move(work);
  } catch (const std::exception&) {  // the connection is closed: nothing will come
  }
  changed_.notify_all();
}

void Mailbox::listen(int rank) {
  for (;;) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return stop_ || peers_[rank].work; });
    if (stop_) return;
    const auto work = peers_[rank].work;
    lock.unlock();
    try {
      if (!work->wait(kUntilItComes)) return;  // whoever takes a message has a timeout
    } catch (const std::exception&) {          // the connection is closed
      return;
    }
    lock.lock();
    peers_[rank].work.reset();
    arrived_.push_back(rank);
    changed_.notify_all();
  }
}

bool Mailbox::take(const Receive& receive, std::chrono::milliseconds timeout) {
  if (const size_t lost_count = lost_count_(); lost_count > lost_told_) {
    lost_told_ = lost_count;
    throw PeerLost("a rank was lost while this waited for a message from any rank; those of the others still come");
  }
  while (receive.source < 0) {
    int source = -1;
    {
      std::unique_lock lock(mutex_);
      const bool in_time = changed_.wait_for(lock, timeout, [&] { return interrupted_ || !arrived_.empty(); });
      if (!in_time) throw Error("no message came");
      if (arrived_.empty()) {
        interrupted_ = false;
        return false;
      }
      source = arrived_.front();
      arrived_.pop_front();
    }
    const auto next = receives_.front();
    receives_.pop_front();
    next->to.copy_(peers_[source].message);
    next->source = source;
    post(source);
  }
  return true;
}

void Mailbox::interrupt() {
  {
    const std::lock_guard lock(mutex_);
    interrupted_ = true;
  }
  changed_.notify_all();
}

}  // namespace lockstep::comm

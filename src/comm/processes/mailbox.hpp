// Mailbox: receives from any rank over a c10d backend that reaches over processes, in the order of arrival.
//
// Gloo has such receives, but they are lost with a peer. Once Gloo gave a receive to a process that then dies or stands
// still, it takes nobody else's message. And a message that a dead process announced blocks all later ones. So this
// posts one receive per member, each with a thread that waits for it.
//
//  1. One mutex guards the messages that have come. No receive is waited for while holding it.
//  2. A member's next receive is posted when its message was taken, so each may be one message ahead.
//  3. The destructor aborts the receives and waits for the threads. The connections must outlive it, or be closed.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace lockstep::comm {

class Mailbox : public std::enable_shared_from_this<Mailbox> {
 public:
  // Receives messages of `bytes` bytes with this tag from all other members. Each member may be one message ahead.
  // `lost_count` gives how many members were lost so far. The connections must outlive the mailbox, or be closed.
  Mailbox(c10::intrusive_ptr<c10d::Backend> backend, int64_t bytes, int tag, std::function<size_t()> lost_count);
  ~Mailbox();
  Mailbox(const Mailbox&) = delete;
  Mailbox& operator=(const Mailbox&) = delete;

  // The next message, whose bytes go to `to`, in the order of these calls. All of it by one thread. After a loss
  // one wait, the present or the next, ends with PeerLost; abort() makes a wait return false.
  c10::intrusive_ptr<c10d::Work> receive(at::Tensor to);

 private:
  class NextMessage;
  struct Peer {
    at::Tensor message;
    c10::intrusive_ptr<c10d::Work> work;  // under way
    std::thread listener;
  };

  struct Receive {
    at::Tensor to;
    int source = -1;  // of its message, once that has come
  };

  void post(int rank);
  void listen(int rank);
  bool take(const Receive& receive, std::chrono::milliseconds timeout);
  void interrupt();

  const c10::intrusive_ptr<c10d::Backend> backend_;
  const int tag_;
  const std::function<size_t()> lost_count_;
  size_t lost_told_ = 0;
  std::deque<std::shared_ptr<Receive>> receives_;  // whose messages are to be taken, in order

  std::mutex mutex_;  // guards what follows; messages that have arrived are the taker's
  std::condition_variable changed_;
  std::vector<Peer> peers_;  // by rank; of the own rank nothing
  std::deque<int> arrived_;  // ranks
  bool interrupted_ = false;
  bool stop_ = false;
};

}  // namespace lockstep::comm

// Streams: orders device work between ranks. On the CPU there is nothing to order and everything here is empty.
//
// Each GPU has one stream on which exchanges run. A call first records how far its rank's current stream is
// (ReadyMark). The exchange stream waits for the marks of all members. A reader of the result makes its current stream
// wait for the DoneMark. No host thread waits. Device-generic (c10::Stream, c10::Event): needs no CUDA header.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>
#include <lockstep/devices/devices.hpp>

#include <functional>
#include <vector>

namespace lockstep::comm {

using ReadyMark = std::vector<c10::Event>;
using DoneMark = std::vector<c10::Event>;

class Streams {
 public:
  explicit Streams(const Devices& devices);

  bool empty() const { return streams_.empty(); }  // without GPUs there is nothing to order

  // Marks everything queued so far on the current stream of `device`. Call it on the rank's thread.
  ReadyMark ready(const c10::Device& device) const;

  // Runs `work` with the exchange streams as current ones, after `marks`.
  void run_after(const std::vector<const ReadyMark*>& marks, const std::function<void()>& work) const;

  // Tells the allocator that the exchange stream uses `tensor`, so that its memory is not given away too early.
  // A run that fails needs it: there a call's tensors are freed though no stream of their rank has waited for the call.
  void keep(const at::Tensor& tensor) const;

  // Marks everything queued so far on the exchange streams.
  DoneMark done() const;

  // Makes the current stream of `device` go on after `mark`. Call it on the rank's thread.
  void wait(const DoneMark& mark, const c10::Device& device) const;

 private:
  std::vector<c10::Stream> streams_;  // one per distinct GPU
};

}  // namespace lockstep::comm

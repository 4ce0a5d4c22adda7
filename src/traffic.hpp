// Traffic: how much one rank sends, and how long its thread is in calls to the others.
//
// Of an allreduce each rank counts as sending 2 (k - 1) / k of its bytes, as a ring does; what threads of one process
// share need not be sent at all. Used by the thread that makes the calls.
#pragma once

#include <lockstep/rank.hpp>

#include "observed_backend.hpp"

#include <memory>

namespace lockstep {

class Traffic : public CallObserver {
 public:
  void posts(c10d::OpType type, int64_t bytes, int ranks) override {
    const auto others = static_cast<double>(ranks - 1);
    const auto size = static_cast<double>(bytes);
    switch (type) {
      case c10d::OpType::SEND:
        sent += size;
        break;
      case c10d::OpType::ALLREDUCE:
        sent += 2 * others / ranks * size;
        break;
      case c10d::OpType::BROADCAST:
        sent += others / ranks * size;  // as a chain sends it, in many pieces
        break;
      default:
        sent += others * size;  // of what is gathered or scattered
    }
  }
  void spent(double more) override { seconds += more; }

  double sent = 0;  // bytes
  double seconds = 0;
};

// A rank like `rank` whose calls, and its groups', are counted.
inline Rank observed(const Rank& rank, const std::shared_ptr<Traffic>& traffic) {
  return rank.wrapped(
      [traffic](const auto& backend) { return c10::make_intrusive<ObservedBackend>(backend, traffic); });
}

}  // namespace lockstep

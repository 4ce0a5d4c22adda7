#include <lockstep/ranks/traffic.hpp>

#include "observed_backend.hpp"

namespace lockstep {
namespace {

class TrafficObserver : public CallObserver {
 public:
  explicit TrafficObserver(std::shared_ptr<Traffic> traffic) : traffic_(std::move(traffic)) {}

  void posts(c10d::OpType type, int64_t bytes, int ranks) override {
    const auto others = static_cast<double>(ranks - 1);
    const auto size = static_cast<double>(bytes);
    switch (type) {
      case c10d::OpType::SEND:
        traffic_->sent += size;
        break;
      case c10d::OpType::ALLREDUCE:
        traffic_->sent += 2 * others / ranks * size;
        break;
      case c10d::OpType::BROADCAST:
      case c10d::OpType::REDUCE:
      case c10d::OpType::ALLTOALL:
      case c10d::OpType::ALLTOALL_BASE:
        traffic_->sent += others / ranks * size;  // a broadcast or reduce is sent as in a chain, in many parts
        break;
      default:
        traffic_->sent += others * size;  // a gather's or scatter's part, to each other rank
    }
  }
  void spent(double seconds) override { traffic_->seconds += seconds; }

 private:
  const std::shared_ptr<Traffic> traffic_;
};

}  // namespace

std::shared_ptr<CallObserver> observer_for(std::shared_ptr<Traffic> traffic) {
  return std::make_shared<TrafficObserver>(std::move(traffic));
}

Rank Traffic::observed(const Rank& rank, std::shared_ptr<Traffic> traffic) {
  return lockstep::observed(rank, {observer_for(std::move(traffic))});
}

}  // namespace lockstep

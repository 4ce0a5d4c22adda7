// TrainedNet: what an Optimizer needs to know of a net: this rank's replica, and where other parameters of the network
// lie. This class is that of a DataParallel, where each replica is the whole network; a net that is split derives one.
#pragma once

#include "io/safetensors.hpp"
#include "replica.hpp"

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace lockstep {

class TrainedNet {
 public:
  explicit TrainedNet(std::shared_ptr<Replica> replica) : replica_(std::move(replica)) {}
  virtual ~TrainedNet() = default;
  TrainedNet& operator=(TrainedNet&&) = delete;

  const std::shared_ptr<Replica>& replica() const { return replica_; }

  // Gives the groups of ranks that hold other parameters of the network than this one.
  virtual std::vector<Rank*> other_parts() { return {}; }
  // Tells whether this rank's values of a parameter count in a norm. If several ranks hold the parameter, only one
  // counts.
  virtual bool counts(const std::string& /*parameter*/) { return true; }
  virtual bool slices_layers() { return false; }  // tells whether ranks have slices of layers
  // Tells whether this rank is the first of all that hold the network.
  virtual bool is_first() { return replica_->rank().index() == 0; }

  // joined() makes this rank's optimizer state that of the whole network, by the parameters' names. part_of() makes the
  // reverse. Call them on all ranks.
  virtual io::NamedTensors joined(io::NamedTensors state) { return state; }
  virtual io::NamedTensors part_of(io::NamedTensors state) { return state; }

 private:
  const std::shared_ptr<Replica> replica_;
};

}  // namespace lockstep

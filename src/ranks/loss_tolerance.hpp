// LossTolerance: a rank that the others can do without for a while. If its process is gone then, they go on, where the
// launcher lets them (LaunchEnvironment::keep_going); calls that need the rank throw PeerLost.
#pragma once

#include <lockstep/ranks/rank.hpp>

#include <string>

namespace lockstep::comm {

class LossTolerance {
 public:
  explicit LossTolerance(const Rank& rank);
  ~LossTolerance();  // ends it too, but says nothing
  LossTolerance(const LossTolerance&) = delete;
  LossTolerance& operator=(const LossTolerance&) = delete;

  void end();  // throws Error if the others have gone on without this rank

 private:
  const Rank rank_;
  bool ended_ = false;
};

// Why the rank with this number among those of `rank` is gone and the others go on; "" if that is not so.
std::string why_lost(const Rank& rank, int other);

}  // namespace lockstep::comm

// PeerLost: a message's other side is gone, and the run goes on without it (see lost_processes.hpp).
#pragma once

#include <lockstep/base/error.hpp>

namespace lockstep::comm {

class PeerLost : public Error {
 public:
  using Error::Error;
};

}  // namespace lockstep::comm

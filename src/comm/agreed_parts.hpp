// AgreedParts: while one lives, all ranks know all parts of the alltoalls and of the averages in a tree that its thread
// posts.
#pragma once

#include "purpose.hpp"

namespace lockstep::comm {

// The text names what decides all ranks' parts. It is compared with the rest of the call, so ranks with different texts
// get an Error. Therefore ranks need not compare the parts, which between processes takes several calls of the store.
class AgreedParts : public ThreadText<AgreedParts> {
 public:
  using ThreadText::ThreadText;
};

}  // namespace lockstep::comm

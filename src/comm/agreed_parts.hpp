// AgreedParts: says that all ranks know all parts of the alltoalls, and of the averages in a tree, that a thread posts
// while it lives.
#pragma once

#include "thread_text.hpp"

namespace lockstep::comm {

// Its text says what decides all parts of all ranks. It becomes part of the call: ranks with other texts make other
// calls, which errors show. So the ranks need not compare their parts, which between processes takes several calls of
// the store.
class AgreedParts : public ThreadText<AgreedParts> {
 public:
  using ThreadText::ThreadText;
};

}  // namespace lockstep::comm

// Purpose: says in errors what its thread's calls are for while it lives: "DataParallel's backward 3".
#pragma once

#include <string>

#include "thread_text.hpp"

namespace lockstep::comm {

// Give a collective call the same purpose on all ranks: it is compared with the rest of the call.
class Purpose : public ThreadText<Purpose> {
 public:
  using ThreadText::ThreadText;

  static std::string text() { return current() == nullptr ? "" : *current(); }
};

}  // namespace lockstep::comm

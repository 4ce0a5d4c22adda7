// Purpose: what a thread's calls are for while it lives, as errors say it: "DataParallel's backward 3".
#pragma once

#include <string>

#include "thread_text.hpp"

namespace lockstep::comm {

// If all ranks make the call, they must all give it the same purpose, as the rest of the call.
class Purpose : public ThreadText<Purpose> {
 public:
  using ThreadText::ThreadText;

  static std::string text() { return current() == nullptr ? "" : *current(); }
};

}  // namespace lockstep::comm

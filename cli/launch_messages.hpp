// LaunchMessages: what `lockstep launch` says on the standard error, a line each.
//
// To say something never waits for who reads: a launcher that stands still starts no successors.
// What there is no room for is kept, and goes out later, in order. Thread-safe.
#pragma once

#include <mutex>
#include <string>

#include "output.hpp"

namespace lockstep::cli {

class LaunchMessages {
 public:
  LaunchMessages();
  ~LaunchMessages();  // waits for a second at most until all has been read
  LaunchMessages(const LaunchMessages&) = delete;
  LaunchMessages& operator=(const LaunchMessages&) = delete;

  void say(const std::string& text);
  void say_what_is_kept();  // to be called again and again

 private:
  std::mutex mutex_;
  Output error_;
};

}  // namespace lockstep::cli

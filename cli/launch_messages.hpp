// LaunchMessages: the messages of `lockstep launch` on the standard error, a line each.
//
// A message never waits for its reader, since a launcher that stands still starts no successors. Messages without room
// are kept, and go out later, in order. LaunchMessages is thread-safe.
#pragma once

#include <mutex>
#include <string>

#include "output.hpp"

namespace lockstep::cli {

class LaunchMessages {
 public:
  LaunchMessages();
  ~LaunchMessages();  // waits until all is read, but at most for a second
  LaunchMessages(const LaunchMessages&) = delete;
  LaunchMessages& operator=(const LaunchMessages&) = delete;

  void say(const std::string& text);
  void say_what_is_kept();  // call it again and again

 private:
  std::mutex mutex_;
  Output error_;
};

}  // namespace lockstep::cli

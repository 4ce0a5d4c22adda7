#include "launch_messages.hpp"

#include <unistd.h>

namespace lockstep::cli {

LaunchMessages::LaunchMessages() : error_(STDERR_FILENO) {}

LaunchMessages::~LaunchMessages() {
  if (!error_.finish(kPatienceAfterStop)) error_.give_up();
}

void LaunchMessages::say(const std::string& text) {
  const std::lock_guard lock(mutex_);
  error_.print("lockstep launch: " + text + "\n");
}

void LaunchMessages::say_what_is_kept() {
  const std::lock_guard lock(mutex_);
  error_.print("");
}

}  // namespace lockstep::cli

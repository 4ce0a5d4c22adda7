#include "rank_thread.hpp"

#include "seconds.hpp"

#include <utility>

namespace lockstep {
namespace {

thread_local UserCode* code_of_this_thread = nullptr;
thread_local int64_t calls = 0;

}  // namespace

std::string UserCode::text(std::chrono::milliseconds at_least) const {
  const std::lock_guard lock(mutex_);
  const auto time = std::chrono::steady_clock::now() - stay_.since;
  if (stay_.where.empty() || time < at_least) return "";
  return "has been in " + stay_.where + " for " + comm::seconds(std::chrono::floor<std::chrono::seconds>(time));
}

bool is_rank_thread() {
  return code_of_this_thread != nullptr;
}

int64_t& calls_of_this_thread() {
  return calls;
}

void set_rank_thread(UserCode& code) {
  code_of_this_thread = &code;
}

InUserCode::InUserCode(std::string where) : other_{std::move(where), std::chrono::steady_clock::now()} {
  exchange();
}

InUserCode::~InUserCode() {
  exchange();
}

void InUserCode::exchange() {
  UserCode* const code = code_of_this_thread;
  if (code == nullptr) return;
  const std::lock_guard lock(code->mutex_);
  std::swap(code->stay_, other_);
}

}  // namespace lockstep

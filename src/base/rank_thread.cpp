#include "rank_thread.hpp"

#include "seconds.hpp"

#include <utility>

namespace lockstep {
namespace {

UserCode*& of_this_thread() {
  static thread_local UserCode* code = nullptr;
  return code;
}

}  // namespace

std::string UserCode::text(std::chrono::milliseconds at_least) const {
  const std::lock_guard lock(mutex_);
  const auto time = std::chrono::steady_clock::now() - stay_.since;
  if (stay_.where.empty() || time < at_least) return "";
  return "has been in " + stay_.where + " for " + comm::seconds(std::chrono::floor<std::chrono::seconds>(time));
}

bool is_rank_thread() {
  return of_this_thread() != nullptr;
}

void set_rank_thread(UserCode& code) {
  of_this_thread() = &code;
}

InUserCode::InUserCode(std::string where) : before_{std::move(where), std::chrono::steady_clock::now()} {
  UserCode* const code = of_this_thread();
  if (code == nullptr) return;
  const std::lock_guard lock(code->mutex_);
  std::swap(code->stay_, before_);
}

InUserCode::~InUserCode() {
  UserCode* const code = of_this_thread();
  if (code == nullptr) return;
  const std::lock_guard lock(code->mutex_);
  std::swap(code->stay_, before_);
}

}  // namespace lockstep

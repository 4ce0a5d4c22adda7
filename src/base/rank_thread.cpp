#include "rank_thread.hpp"

namespace lockstep {
namespace {

bool& flag() {
  static thread_local bool is_rank = false;
  return is_rank;
}

}  // namespace

bool is_rank_thread() {
  return flag();
}

void set_rank_thread() {
  flag() = true;
}

}  // namespace lockstep

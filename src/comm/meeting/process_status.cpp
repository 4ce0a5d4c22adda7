#include "process_status.hpp"

#include "stored.hpp"

#include <cstdint>
#include <vector>

namespace lockstep::comm {
namespace {

const std::string kLost = "lost: ";

std::string status_key(int process) {
  return "status/" + std::to_string(process);
}

std::vector<uint8_t> status_bytes(const std::string& text) {
  return {text.begin(), text.end()};
}

}  // namespace

void begin_status(c10d::Store& store, int process) {
  store.set(status_key(process), status_bytes(kNeeded));
}

std::string change_status(c10d::Store& store, int process, const std::string& from, const std::string& to) {
  const auto now = store.compareSet(status_key(process), status_bytes(from), status_bytes(to));
  return {now.begin(), now.end()};
}

std::string reason_in(const std::string& status) {
  return status.starts_with(kLost) ? status.substr(kLost.size()) : "";
}

std::string status_of(c10d::Store& store, int process) {
  return store.check({status_key(process)}) ? store.get_to_str(status_key(process)) : "";
}

bool declare_lost(c10d::Store& store, int process, const std::string& why) {
  if (reason_in(change_status(store, process, kDispensable, kLost + why)).empty()) return false;
  add_to_count(store, "lost_count", 1);  // also if another one declared it: that one may not have come to this
  return true;
}

bool is_lost(c10d::Store& store, int process) {
  return !reason_in(status_of(store, process)).empty();
}

}  // namespace lockstep::comm

#include "texts.hpp"

#include "base/seconds.hpp"

namespace lockstep::comm {

std::string name_of(int rank, const Devices& devices) {
  return "rank " + std::to_string(rank) + " (" + devices[rank].str() + ")";
}

std::string text_of_different_calls(const std::string& place, const NamedCall& one, const NamedCall& other) {
  return kCallsDiffer + (place.empty() ? "" : " at " + place) + ": " + one.rank + " called " + one.call + ", " +
         other.rank + " called " + other.call + kSameCallsInOrder;
}

std::string text_of_standstill(const std::string& waits) {
  return "the ranks wait for each other: " + waits + kSameCallsInOrder;
}

std::string text_of_return(const std::string& other, const std::string& rank, const std::string& where) {
  return other + " returned without the call that " + rank + " waits for: " + where + kSameCalls;
}

std::string text_of_unanswered_call(const std::string& rank, const std::string& where, const std::string& missing) {
  return rank + " called " + where + " and did not wait for it; it never came about, for want of " + missing +
         kSameCalls;
}

std::string text_of_timeout(const std::string& rank, std::chrono::milliseconds timeout, const std::string& where,
                            const std::string& missing) {
  return rank + " waited " + seconds(timeout) + " in " + where + " for " + missing +
         ". If that is no error, raise the timeout (RunOptions::timeout)";
}

std::string text_of_same_memory(int rank, int other, const std::string& call) {
  return "ranks " + std::to_string(rank) + " and " + std::to_string(other) + " gave the same memory to " + call +
         "; each rank needs a tensor of its own";
}

}  // namespace lockstep::comm

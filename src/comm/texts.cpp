#include "texts.hpp"

#include "base/seconds.hpp"

#include <utility>

namespace lockstep::comm {

namespace {

// Gives the likely cause of a call that some ranks miss, by a word of the call's text.
std::string hint_for(const std::string& calls) {
  static constexpr std::pair<const char*, const char*> kHints[] = {
      {" for mean()",
       "mean() and Loss::global_item() are calls of all ranks: make them outside of `if (rank.index() == 0)`, and "
       "print there what they gave"},
      {" for any()", "any() is a call of all ranks: make it outside of conditions that one rank alone fulfils"},
      {" for making a ",
       "no rank may make one alone: not within in_turn(), nor within `if (rank.index() == 0)`; in_turn() is for the "
       "module"},
      {"'s backward ",
       "backward() is a call of all ranks, as often on each: take as many batches everywhere, and leave a loop by "
       "rank.any(), not by a rank's own loss"}};
  for (const auto& [word, hint] : kHints) {
    if (calls.find(word) != std::string::npos) return std::string(". Maybe: ") + hint;
  }
  return "";
}

}  // namespace

std::string name_of(int rank, const Devices& devices) {
  return "rank " + std::to_string(rank) + " (" + devices[rank].str() + ")";
}

std::string text_of_different_calls(const std::string& place, const NamedCall& one, const NamedCall& other) {
  return kCallsDiffer + (place.empty() ? "" : " at " + place) + ": " + one.rank + " called " + one.call + ", " +
         other.rank + " called " + other.call + kSameCallsInOrder + hint_for(one.call + other.call);
}

std::string text_of_standstill(const std::string& waits) {
  return "the ranks wait for each other: " + waits + kSameCallsInOrder + hint_for(waits);
}

std::string text_of_return(const std::string& other, const std::string& rank, const std::string& where) {
  return other + " returned without the call that " + rank + " waits for: " + where + kSameCalls + hint_for(where);
}

std::string text_of_unanswered_call(const std::string& rank, const std::string& where, const std::string& missing) {
  return rank + " called " + where + " and did not wait for it; it never came about, for want of " + missing +
         kSameCalls + hint_for(where);
}

std::string text_of_timeout(const std::string& rank, std::chrono::milliseconds timeout, const std::string& where,
                            const std::string& missing) {
  return rank + " waited " + seconds(timeout) + " in " + where + " for " + missing +
         ". If that is no error, raise the timeout (RunOptions::timeout)";
}

std::string text_of_ended_run(const std::string& rank) {
  return rank +
         ": the run() that this rank belongs to is over, so it can make no more calls. Make, use and drop what needs a "
         "Rank, such as a DataParallel or an optimizer over all ranks, in the function that run() calls; a module "
         "itself can be kept and used afterwards";
}

std::string text_of_same_memory(int rank, int other, const std::string& call) {
  return "ranks " + std::to_string(rank) + " and " + std::to_string(other) + " gave the same memory to " + call +
         "; each rank needs a tensor of its own";
}

}  // namespace lockstep::comm

// These texts are of all backends: the names of ranks, and the errors that ranks in threads and in processes share. A
// rank is a name here, and `where` is a call in words with its place: "barrier (collective call 3)".
#pragma once

#include <lockstep/devices/devices.hpp>

#include <chrono>
#include <string>

namespace lockstep::comm {

// Gives "rank 1 (cpu)", as every text names a rank.
std::string name_of(int rank, const Devices& devices);

// The beginning of a text, and the advice at its end.
inline constexpr const char* kCallsDiffer = "the ranks' calls differ";
inline constexpr const char* kSameCalls = ". All ranks must make the same calls";
inline constexpr const char* kSameCallsInOrder = ". All ranks must make the same calls in the same order";

struct NamedCall {
  std::string rank, call;
};

// Two ranks made different calls at one place ("collective call 3"). The place may be "".
std::string text_of_different_calls(const std::string& place, const NamedCall& one, const NamedCall& other);

// `waits` says who waits for whom.
std::string text_of_standstill(const std::string& waits);

// `other` returned without the call that `rank` waits for.
std::string text_of_return(const std::string& other, const std::string& rank, const std::string& where);

// Nobody waited for a call that `missing` did not make.
std::string text_of_unanswered_call(const std::string& rank, const std::string& where, const std::string& missing);

// `rank` waited for `missing` until its timeout.
std::string text_of_timeout(const std::string& rank, std::chrono::milliseconds timeout, const std::string& where,
                            const std::string& missing);

// The rank was kept longer than its run.
std::string text_of_ended_run(const std::string& rank);

// Two ranks gave the same memory to a call that changes it.
std::string text_of_same_memory(int rank, int other, const std::string& call);

}  // namespace lockstep::comm

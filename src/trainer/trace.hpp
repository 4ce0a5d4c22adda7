// Trace: a timeline of the ranks' steps for ui.perfetto.dev or chrome://tracing, from the profiler that LibTorch ships.
//
// Each rank is a process on it. Its threads have lockstep's ranges (forward, backward, update) and LibTorch's
// operators. Beside the threads are the rank's buckets, from the post of a bucket's allreduce to its completion. Make
// one trace at a time in a process.
#pragma once

#include <lockstep/ranks/rank.hpp>

#include <cstdint>
#include <filesystem>
#include <map>
#include <mutex>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

namespace lockstep {

inline constexpr int64_t kTraceAfterSteps = 2;  // a step that learns the buckets' order, and the first one in it
inline constexpr int64_t kTracedSteps = 20;

// Gives the file in which a process of a launcher writes its own ranks' timeline: trace.json, trace.1.json, …
std::filesystem::path trace_file(const std::filesystem::path& file, int process);

class Trace {
 public:
  // Traces the ranks of a run on `devices` that are in this process. Make it on the program's main thread, since the
  // profiler complains of others. Throws Error if `file` cannot be written.
  Trace(std::filesystem::path file, const Devices& devices);
  ~Trace();  // ends a profiler that a failure left running; writes nothing
  Trace& operator=(Trace&&) = delete;

  // Call before_step() on every rank before each step, and end() after the last. kTracedSteps steps are traced after
  // kTraceAfterSteps others; the ranks wait for each other where that begins and ends.
  void before_step(Rank& rank);
  void end(Rank& rank);

  bool written() const { return written_; }  // false: there were too few steps

  // Gives a step in the middle of a written timeline, without operators: {"seconds": 0.1, "ranks": {"0": [[name, begin,
  // seconds], …]}}, in seconds since the first rank began. A rank's step ends with its update. Ranks of other processes
  // are not in it.
  nlohmann::ordered_json step() const;

 private:
  void start();
  void finish();

  const std::filesystem::path file_;
  const Devices devices_;
  std::mutex mutex_;              // guards the maps
  std::map<int, int64_t> steps_;  // steps begun so far, by rank
  std::map<uint64_t, int> rank_of_thread_;
  std::map<int, std::string> names_;  // names by rank
  bool running_ = false;              // these two: changed by the process's first rank between barriers
  bool written_ = false;

  struct Range {
    int rank;
    std::string name;
    double begin, end;  // seconds
  };
  std::vector<Range> ranges_;  // lockstep's own ranges of steps
};

}  // namespace lockstep

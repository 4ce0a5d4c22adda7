// Whether the calling thread is a rank of run(), and which code of its user that rank is in.
#pragma once

#include <chrono>
#include <mutex>
#include <string>

namespace lockstep {

// Which code of its user a rank is in, for those who wait for the rank. Thread-safe.
class UserCode {
 public:
  // "has been in Samples::read (batch 7) for 10 s"; "": for less time than that, or nothing is known.
  std::string text(std::chrono::milliseconds at_least) const;

 private:
  friend class InUserCode;
  struct Stay {
    std::string where;  // empty: in no such code
    std::chrono::steady_clock::time_point since;
  };
  mutable std::mutex mutex_;
  Stay stay_;  // guarded by mutex_
};

bool is_rank_thread();
void set_rank_thread(UserCode& code);  // run() calls it in each thread that it starts. `code` must outlive the thread

// While it lives, the rank that is this thread is in code that its user gave. Other threads' say nothing.
class InUserCode {
 public:
  explicit InUserCode(std::string where);
  ~InUserCode();
  InUserCode(const InUserCode&) = delete;
  InUserCode& operator=(const InUserCode&) = delete;

 private:
  UserCode::Stay before_;
};

}  // namespace lockstep

// Tells whether the calling thread is a rank of run(), and in which code of its user that rank is.
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>

namespace lockstep {

// Tells those who wait for a rank in which code of its user the rank is. Thread-safe.
class UserCode {
 public:
  // Gives "has been in Samples::read (batch 7) for 10 s", or "" if the rank is in no such code, or for less time.
  std::string text(std::chrono::milliseconds at_least) const;

 private:
  friend class InUserCode;
  struct Stay {
    std::string where;  // empty: the rank is in no code of its user
    std::chrono::steady_clock::time_point since;
  };
  mutable std::mutex mutex_;
  Stay stay_;  // guarded by mutex_
};

bool is_rank_thread();
// Counts the calls to other ranks that the calling thread has begun. Rank adds them.
int64_t& calls_of_this_thread();
void set_rank_thread(UserCode& code);  // run() calls it in each rank's thread. Keep `code` alive until the thread ends

// While an InUserCode lives, this rank thread is in code that its user gave. On other threads it says nothing.
class InUserCode {
 public:
  explicit InUserCode(std::string where);
  ~InUserCode();
  InUserCode& operator=(InUserCode&&) = delete;

 private:
  void exchange();

  UserCode::Stay other_;  // the thread's stay before; in the constructor and the destructor, the next stay
};

}  // namespace lockstep

// Scheduler: one program as several processes, of whose threads one runs at a time. A seed decides which.
//
// The threads are real ones, so that thread_local variables are right, and wait their turn. c_library.cpp brings them
// here: it stands in for the C library's locks, condition variables, clocks and sleeps, so the code under test needs no
// change. Time is virtual. It goes on a little with each scheduling point, and jumps when all threads wait.
//
//  1. Only the running thread touches the scheduler, or the threads' common state. So neither needs a lock.
//  2. A thread that is not a simulated one (the program's first) gets the C library's own functions.
//  3. The threads of a process that was killed wait for ever. They hold nothing that other processes need: each process
//     has its own objects.
//  4. All choices come from the seed, in the order in which they are asked for. So a seed gives one run.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

namespace lockstep::simulation {

using Time = int64_t;  // nanoseconds since the simulation began
constexpr Time kMicrosecond = 1'000, kMillisecond = 1'000'000, kSecond = 1'000'000'000;
constexpr Time kNever = INT64_MAX;

struct Process {
  int number = 0;
  std::string name;
  std::map<std::string, std::string> environment = {};
  bool killed = false;
  bool over = false;         // its first thread has ended
  Time stopped_until = 0;    // it stands still until then
  Time slowness = 0;         // the most that it loses at a scheduling point
  int64_t points = 0;        // scheduling points that it has passed
  int connections = 0;       // to stores
  int groups = 0;            // groups that it has a part in
  std::set<int> locks = {};  // descriptors of what it has locked, which the system closes at the process's end

  bool lives() const { return !killed && !over; }
};

struct Thread {
  Process* process = nullptr;
  int number = 0;
  pthread_t handle{};
  std::function<void*()> body = {};
  std::atomic<int> turn = 0;  // 1: it may run
  enum { ready, waits, over } state = ready;
  const void* waits_for = nullptr;
  Time deadline = kNever;
  bool woken = false;
};

// More than twelve functions: it is to the threads what a kernel is, with calls for threads, sleep, time and faults.
class Scheduler {
 public:
  Scheduler(uint64_t seed, bool with_log, Time limit);

  static Scheduler* of_this_program();  // null: none
  static Thread* this_thread();         // null: not a simulated one

  // Adds a process. start() gives it a first thread. Both work also while run() runs.
  Process& add_process(const std::string& name);
  void start(Process& process, std::function<void()> body);

  // Runs all threads until they are over, or none can go on, or the limit of time is over. Gives what is left: "" if
  // nothing is.
  std::string run();

  // ---- For the running thread.

  Time now() const { return now_; }
  uint64_t draw(uint64_t below);
  bool one_in(uint64_t number) { return draw(number) == 0; }

  void point();  // others may run here
  void sleep(Time time) { wait(nullptr, now_ + time); }
  bool wait(const void* what, Time deadline);  // gives whether it was woken before the deadline
  void wake_all(const void* what);
  void wake_one(const void* what);

  int create(pthread_t* handle, const pthread_attr_t* attributes, std::function<void*()> body);
  void join(pthread_t handle);

  // ---- Events and faults.

  void at(Time time, std::function<void()> event);  // events must not wait
  void at_point(Process& process, int64_t point, std::function<void()> fault);
  void kill(Process& process);
  void stop(Process& process, Time time);
  std::function<void(Process&)> on_death = {};   // the process was killed, or is over
  int threads_of(const Process& process) const;  // counts the threads that are not over

  void note(const std::string& text);  // a line of the log; to be asked for with logs() if the text costs time
  bool logs() const { return with_log_; }
  uint64_t trace() const { return trace_; }  // a digest of all choices
  int64_t points() const { return points_; }
  const std::vector<std::unique_ptr<Process>>& processes() const { return processes_; }

 private:
  static void* begin(void* thread);
  static void end(void* thread);
  Thread* choose();
  bool is_due(const Thread& thread) const;
  void give_turn_to(Thread* next);
  static void await_turn(Thread& thread);
  void leave();  // lets another run; comes back in its turn
  void run_events();
  std::string what_is_left() const;

  const bool with_log_;
  const Time limit_;
  uint64_t random_;
  uint64_t trace_ = 0;
  uint64_t switch_rate_;  // a switch at one point in so many. Often would cost most of the time, and find little more
  int64_t points_ = 0;
  Time now_ = 0;
  std::vector<std::unique_ptr<Process>> processes_;
  std::vector<std::unique_ptr<Thread>> threads_;
  std::vector<Thread*> living_;
  std::vector<Thread*> due_;  // choose() alone uses it
  std::multimap<Time, std::function<void()>> events_;
  std::map<Process*, std::multimap<int64_t, std::function<void()>>> faults_;
  std::atomic<int> all_done_ = 0;
};

}  // namespace lockstep::simulation

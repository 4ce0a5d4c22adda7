#include "scheduler.hpp"

#include <linux/futex.h>

#include "base/scramble.hpp"
#include "c_library.hpp"

#include <algorithm>
#include <cstdio>
#include <stdexcept>
#include <utility>

namespace lockstep::simulation {
namespace {

Scheduler* of_program = nullptr;
thread_local Thread* running = nullptr;

constexpr Time kOfAPoint = 300;  // time of the work between two points

void futex_wait(std::atomic<int>& word) {
  while (word.load(std::memory_order_acquire) == 0) {
    c_library::futex(reinterpret_cast<int*>(&word), FUTEX_WAIT_PRIVATE, 0);
  }
  word.store(0, std::memory_order_relaxed);
}

void futex_wake(std::atomic<int>& word) {
  word.store(1, std::memory_order_release);
  c_library::futex(reinterpret_cast<int*>(&word), FUTEX_WAKE_PRIVATE, 1);
}

}  // namespace

Scheduler::Scheduler(uint64_t seed, bool with_log, Time limit)
    : with_log_(with_log), limit_(limit), random_(mix({seed})), switch_rate_(one_in(16) ? 1 : uint64_t{2} << draw(6)) {
  of_program = this;
}

Scheduler* Scheduler::of_this_program() {
  return of_program;
}

Thread* Scheduler::this_thread() {
  return running;
}

uint64_t Scheduler::draw(uint64_t below) {
  random_ += kGolden;
  return scramble(random_) % below;
}

Process& Scheduler::add_process(const std::string& name) {
  processes_.push_back(std::make_unique<Process>());
  processes_.back()->number = static_cast<int>(processes_.size()) - 1;
  processes_.back()->name = name;
  return *processes_.back();
}

void Scheduler::start(Process& process, std::function<void()> body) {
  auto thread = std::make_unique<Thread>();
  thread->process = &process;
  thread->number = static_cast<int>(threads_.size());
  thread->body = [this, &process, body = std::move(body)]() -> void* {
    body();
    process.over = true;
    if (on_death) on_death(process);
    return nullptr;
  };
  if (c_library::create(&thread->handle, nullptr, begin, thread.get()) != 0) throw std::runtime_error("no thread");
  living_.push_back(thread.get());
  threads_.push_back(std::move(thread));
}

std::string Scheduler::run() {
  give_turn_to(choose());
  futex_wait(all_done_);
  return what_is_left();
}

// ---- Threads.

void* Scheduler::begin(void* argument) {
  auto& thread = *static_cast<Thread*>(argument);
  await_turn(thread);
  running = &thread;
  static const pthread_key_t key = [] {
    pthread_key_t made{};
    if (pthread_key_create(&made, end) != 0) throw std::runtime_error("no key for threads");
    return made;
  }();
  pthread_setspecific(key, &thread);
  return thread.body();
}

// The C library calls it when the thread's thread_local variables are gone.
void Scheduler::end(void* argument) {
  auto& thread = *static_cast<Thread*>(argument);
  thread.state = Thread::over;
  Scheduler& scheduler = *of_program;
  scheduler.living_.erase(std::find(scheduler.living_.begin(), scheduler.living_.end(), &thread));
  scheduler.wake_all(&thread);
  running = nullptr;
  scheduler.give_turn_to(scheduler.choose());
}

int Scheduler::create(pthread_t* handle, const pthread_attr_t* attributes, std::function<void*()> body) {
  auto thread = std::make_unique<Thread>();
  thread->process = running->process;
  thread->number = static_cast<int>(threads_.size());
  thread->body = std::move(body);
  const int error = c_library::create(&thread->handle, attributes, begin, thread.get());
  if (error != 0) return error;
  *handle = thread->handle;
  living_.push_back(thread.get());
  threads_.push_back(std::move(thread));
  point();
  return 0;
}

// The system gives a handle again once its thread is over, so the last thread with the handle is meant.
void Scheduler::join(pthread_t handle) {
  const auto last = std::find_if(threads_.rbegin(), threads_.rend(),
                                 [&](const auto& thread) { return pthread_equal(thread->handle, handle) != 0; });
  if (last == threads_.rend()) return;
  const Thread& thread = **last;
  while (thread.state != Thread::over) wait(&thread, kNever);
}

// ---- Whose turn it is.

bool Scheduler::is_due(const Thread& thread) const {
  const Process& process = *thread.process;
  if (!process.lives() || process.stopped_until > now_) return false;
  return thread.state == Thread::ready || (thread.state == Thread::waits && thread.deadline <= now_);
}

Thread* Scheduler::choose() {
  for (;;) {
    run_events();
    if (now_ > limit_) return nullptr;
    due_.clear();
    for (Thread* const thread : living_) {
      if (is_due(*thread)) due_.push_back(thread);
    }
    if (!due_.empty()) break;
    Time next = events_.empty() ? kNever : events_.begin()->first;
    for (const Thread* const thread : living_) {
      if (!thread->process->lives()) continue;
      const Time due = thread->state == Thread::ready ? now_ : thread->deadline;
      if (due != kNever) next = std::min(next, std::max(due, thread->process->stopped_until));
    }
    if (next == kNever) return nullptr;
    now_ = std::max(now_, next);
  }
  Thread* const next = due_[draw(due_.size())];
  if (next->state == Thread::waits) next->woken = false;
  next->state = Thread::ready;
  trace_ = mix({trace_, static_cast<uint64_t>(next->number), static_cast<uint64_t>(now_)});
  return next;
}

void Scheduler::give_turn_to(Thread* next) {
  futex_wake(next == nullptr ? all_done_ : next->turn);
}

void Scheduler::await_turn(Thread& thread) {
  futex_wait(thread.turn);
}

void Scheduler::leave() {
  Thread* const me = running;
  Thread* const next = choose();
  if (next == me) return;
  give_turn_to(next);
  await_turn(*me);
}

void Scheduler::point() {
  Process& process = *running->process;
  now_ += kOfAPoint;
  ++points_;
  ++process.points;
  if (const auto faults = faults_.find(&process); faults != faults_.end()) {
    auto& due = faults->second;
    while (!due.empty() && due.begin()->first <= process.points) {
      const auto fault = std::move(due.begin()->second);
      due.erase(due.begin());
      fault();
    }
  }
  if (process.slowness > 0 && one_in(4)) {
    sleep(static_cast<Time>(draw(process.slowness)));
  } else if (!process.lives() || process.stopped_until > now_ || one_in(switch_rate_)) {
    leave();
  } else {
    run_events();
  }
}

bool Scheduler::wait(const void* what, Time deadline) {
  running->state = Thread::waits;
  running->waits_for = what;
  running->deadline = deadline;
  running->woken = false;
  leave();
  running->waits_for = nullptr;
  return running->woken;
}

void Scheduler::wake_all(const void* what) {
  for (Thread* const thread : living_) {
    if (thread->state != Thread::waits || thread->waits_for != what) continue;
    thread->state = Thread::ready;
    thread->woken = true;
  }
}

void Scheduler::wake_one(const void* what) {
  std::vector<Thread*> waiting;
  for (Thread* const thread : living_) {
    if (thread->state == Thread::waits && thread->waits_for == what) waiting.push_back(thread);
  }
  if (waiting.empty()) return;
  Thread* const one = waiting[draw(waiting.size())];
  one->state = Thread::ready;
  one->woken = true;
}

// ---- Events and faults.

void Scheduler::at(Time time, std::function<void()> event) {
  events_.emplace(std::max(time, now_), std::move(event));
}

void Scheduler::at_point(Process& process, int64_t point, std::function<void()> fault) {
  faults_[&process].emplace(point, std::move(fault));
}

void Scheduler::run_events() {
  while (!events_.empty() && events_.begin()->first <= now_) {
    const auto event = std::move(events_.begin()->second);
    events_.erase(events_.begin());
    Thread* const me = std::exchange(running, nullptr);  // an event is no thread's
    event();
    running = me;
  }
}

void Scheduler::kill(Process& process) {
  if (!process.lives()) return;
  note("killed: " + process.name);
  process.killed = true;
  if (on_death) on_death(process);
}

void Scheduler::stop(Process& process, Time time) {
  if (!process.lives()) return;
  note("stands still for " + std::to_string(time / kMillisecond) + " ms: " + process.name);
  process.stopped_until = now_ + time;
}

void Scheduler::note(const std::string& text) {
  if (!with_log_) return;
  const std::string who =
      running == nullptr ? "" : running->process->name + ", thread " + std::to_string(running->number);
  std::printf("%12.6f s  %-24s %s\n", static_cast<double>(now_) / kSecond, who.c_str(), text.c_str());
}

int Scheduler::threads_of(const Process& process) const {
  return static_cast<int>(
      std::count_if(living_.begin(), living_.end(), [&](const Thread* thread) { return thread->process == &process; }));
}

std::string Scheduler::what_is_left() const {
  std::string text;
  for (const Thread* const thread : living_) {
    if (!thread->process->lives()) continue;
    text += (text.empty() ? "" : ", ") + ("thread " + std::to_string(thread->number)) + " of " + thread->process->name;
  }
  return text;
}

}  // namespace lockstep::simulation

#include "activity.hpp"

#include <ctime>

#include "io/process_stat.hpp"

#include <filesystem>
#include <system_error>
#include <utility>

namespace lockstep::comm {
namespace {

using namespace std::chrono_literals;

constexpr auto kBetweenLooksAtThreads = 250ms;
constexpr int kLeastPart = 20;  // computing counts above 1/20 of the time, since a process that only waits takes less

std::chrono::nanoseconds time_of(clockid_t clock) {
  timespec time{};
  clock_gettime(clock, &time);
  return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
}

// Linux shows state D while a thread waits for a disk, or for a file system on the network.
bool a_thread_waits_for_a_disk() {
  std::error_code error;
  for (const auto& thread : std::filesystem::directory_iterator("/proc/self/task", error)) {
    if (io::stat_after_name(thread.path()).starts_with('D')) return true;
  }
  return false;
}

}  // namespace

int64_t Activity::count(int64_t moves, bool on_its_own) {
  if (moves != std::exchange(moves_, moves)) ++count_;
  const auto now = Clock::now();
  if (now - looked_ < kBetweenLooksAtThreads) return count_;
  const Time computed = time_of(CLOCK_PROCESS_CPUTIME_ID) - time_of(CLOCK_THREAD_CPUTIME_ID);
  const auto part = (now - std::exchange(looked_, now)) / kLeastPart;
  const bool computes = computed - std::exchange(computed_, computed) > part;
  if (on_its_own && (computes || a_thread_waits_for_a_disk())) ++count_;
  return count_;
}

}  // namespace lockstep::comm

#include "elastic_job.hpp"

#include <c10/util/Exception.h>
#include <lockstep/base/error.hpp>
#include <lockstep/ranks/rank.hpp>

#include "base/start_thread.hpp"
#include "comm/processes/job.hpp"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>
#include <utility>

namespace lockstep {

std::string to_string(const ElasticBounds& bounds) {
  return bounds.most == 0 ? "none" : std::to_string(bounds.fewest) + ":" + std::to_string(bounds.most);
}

namespace {

void check_bounds(bool makes_sense, const std::string& bounds) {
  if (makes_sense) return;
  throw Error("elastic " + bounds + " is not MIN:MAX, numbers of processes with 1 <= MIN <= MAX, such as 2:4");
}

}  // namespace

ElasticBounds elastic_bounds_from(const std::string& text) {
  if (text == "none") return {};
  ElasticBounds bounds;
  const char* const end = text.data() + text.size();
  const auto fewest = std::from_chars(text.data(), end, bounds.fewest);
  const bool has_colon = fewest.ec == std::errc() && fewest.ptr != end && *fewest.ptr == ':';
  const auto most = std::from_chars(has_colon ? fewest.ptr + 1 : end, end, bounds.most);
  const bool is_whole = has_colon && most.ec == std::errc() && most.ptr == end;
  check_bounds(is_whole && bounds.fewest >= 1 && bounds.most >= bounds.fewest, text);
  return bounds;
}

namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

constexpr auto kUntilTheyLeft = 2s;  // then those who have left go on together
constexpr auto kBeat = 50ms;
constexpr auto kLongestPauseOfEntering = 2ms;  // of one who waits for a newer generation

comm::LaunchEnvironment launch_of_elastic_job() {
  auto& job = comm::Job::of_this_process();
  if (job.seat()) {
    throw Error("an elastic job trains once, and this process has done so; start the job as one that is not elastic");
  }
  return *job.launch();
}

comm::Rendezvous& rendezvous_of(const comm::LaunchEnvironment& launch, const std::stop_token& stop) {
  return comm::Job::of_this_process().rendezvous(launch, {RunOptions().rendezvous_timeout, stop});
}

[[noreturn]] void lose_launcher(const comm::LaunchEnvironment& launch) {
  throw Error("process " + std::to_string(launch.member) +
              " of an elastic job: the launcher is gone: the store that it keeps does not answer");
}

comm::Generations generations_of(const comm::LaunchEnvironment& launch, const std::stop_token& stop) {
  try {
    return comm::Generations(rendezvous_of(launch, stop).connect(comm::kGenerations));
  } catch (const c10::DistError&) {
    lose_launcher(launch);
  }
}

}  // namespace

bool ElasticJob::is_asked_for() {
  const auto launch = comm::Job::of_this_process().launch();
  return launch && launch->member >= 0;
}

void ElasticJob::check(const ElasticBounds& bounds) {
  if (bounds == ElasticBounds()) return;
  check_bounds(bounds.fewest >= 1 && bounds.most >= bounds.fewest,
               std::to_string(bounds.fewest) + ":" + std::to_string(bounds.most));
  if (is_asked_for()) return;
  throw Error("this program asks for an elastic job (elastic " + to_string(bounds) +
              "), and was not started as one. lockstep launch starts such jobs, on one machine and on several, also "
              "under SLURM, mpirun and torchrun; its help and docs/processes.md say how");
}

ElasticJob::ElasticJob(std::stop_token stop, std::chrono::milliseconds silence, const ElasticBounds& bounds)
    : stop_(std::move(stop)),
      silence_(comm::silence_range(silence)),
      bounds_(bounds),
      launch_(launch_of_elastic_job()),
      generations_(generations_of(launch_, stop_)) {
  try {
    generations_.take_part();
  } catch (const c10::DistError&) {
    lose_launcher(launch_);
  }
  thread_ = start_thread<std::jthread>([this](const std::stop_token& end) { live(end); });
}

// Nothing of the last generation outlives the job.
ElasticJob::~ElasticJob() {
  comm::Job::of_this_process().wait_for_work_beside();
}

bool ElasticJob::enter() {
  comm::Generation now;
  try {
    for (now = generations_.newest(); !now.over && !now.index_of(launch_.member); now = generations_.newest()) {
      if (entered_) {
        throw Error("the others have gone on without process " + std::to_string(launch_.member) +
                    " of the job: it, or the launcher of its machine, stood still or was not reached for too long");
      }
      if (stop_.stop_requested()) throw Stopped("stopped by request");
      const auto others = static_cast<int>(now.members.size());
      if (bounds_.most > 0 && others >= bounds_.most) {  // the others go on
        generations_.note_surplus(launch_.member);
        throw Error("process " + std::to_string(launch_.member) + " of an elastic job is one too many: " +
                    std::to_string(others) + " run, and it is to have at most " + std::to_string(bounds_.most));
      }
      generations_.join(launch_.member);
      std::this_thread::sleep_for(kLongestPauseOfEntering);
    }
  } catch (const c10::DistError&) {
    lose_launcher(launch_);
  }
  if (now.over) return false;
  entered_ = true;
  const int count = static_cast<int>(now.members.size());
  const int fewest = std::max(launch_.fewest, bounds_.fewest);
  const auto refuse = [&](const std::string& why) {
    generations_.end();
    throw Error("the elastic job has " + std::to_string(count) + (count == 1 ? " process" : " processes") + why);
  };
  if (count < fewest) refuse(" left, and goes on with at least " + std::to_string(fewest));
  if (bounds_.most > 0 && count > bounds_.most) refuse(", and is to have at most " + std::to_string(bounds_.most));
  comm::Job::of_this_process().enter({comm::keys_of_generation(now.number), *now.index_of(launch_.member), count});
  const std::lock_guard lock(mutex_);
  newer_ = {};
  generation_ = now.number;
  return true;
}

void ElasticJob::leave() {
  try {
    generations_.leave(generation_, launch_.member);
    const auto begin = Clock::now();
    while (generations_.newest().number == generation_) {
      if (Clock::now() > begin + kUntilTheyLeft) generations_.keep_those_who_left(generation_);
      std::this_thread::sleep_for(comm::pause_after(Clock::now() - begin, kLongestPauseOfEntering));
    }
  } catch (const c10::DistError&) {
    lose_launcher(launch_);
  }
}

void ElasticJob::note_beginning() {
  try {
    generations_of(launch_, stop_).note_beginning(generation_);
  } catch (const c10::DistError&) {
    lose_launcher(launch_);
  }
}

std::stop_token ElasticJob::newer() const {
  const std::lock_guard lock(mutex_);
  return newer_.get_token();
}

void ElasticJob::live(const std::stop_token& end) {
  try {
    auto generations = generations_of(launch_, stop_);
    std::mutex mutex;
    std::unique_lock lock(mutex);
    std::condition_variable_any ended;
    comm::SilenceLimit own(silence_);
    for (int64_t beats = 1; !end.stop_requested(); ++beats) {
      own.beat(Clock::now());
      generations.beat(launch_.member, {beats, own.limit(), silence_.most});
      const int newest = generations.newest().number;
      {
        const std::lock_guard guard(mutex_);
        if (newest > generation_) newer_.request_stop();
      }
      ended.wait_for(lock, end, kBeat, [] { return false; });
    }
    generations.beat(launch_.member, {});
  } catch (const std::exception&) {  // the run itself finds out that the launcher is gone
  }
}

}  // namespace lockstep

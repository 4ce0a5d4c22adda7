#include "elastic_job.hpp"

#include <c10/util/Exception.h>
#include <lockstep/base/error.hpp>
#include <lockstep/ranks/rank.hpp>

#include "base/rank_thread.hpp"
#include "base/start_thread.hpp"
#include "comm/processes/job.hpp"

#include <condition_variable>
#include <utility>

namespace lockstep {

namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

constexpr auto kUntilTheyLeft = 2s;  // the members who have left by then go on together
constexpr auto kBeat = 50ms;
constexpr auto kLongestPauseOfEntering = 2ms;  // the pause between two looks for a newer generation

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

// Returns use(), which asks the launcher's store.
auto with_launcher(const comm::LaunchEnvironment& launch, const auto& use) {
  try {
    return use();
  } catch (const c10::DistError&) {
    throw Error("process " + std::to_string(launch.member) +
                    " of an elastic job: the launcher is gone: the store that it keeps does not answer",
                {Error::machine});
  }
}

comm::Generations generations_of(const comm::LaunchEnvironment& launch, const std::stop_token& stop) {
  return with_launcher(launch,
                       [&] { return comm::Generations(rendezvous_of(launch, stop).connect(comm::kGenerations)); });
}

}  // namespace

bool ElasticJob::is_asked_for() {
  const auto launch = comm::Job::of_this_process().launch();
  return launch && launch->member >= 0 && !is_rank_thread();
}

ElasticJob::ElasticJob(std::stop_token stop, std::chrono::milliseconds silence, const std::string& folder)
    : stop_(std::move(stop)),
      silence_(comm::silence_range(silence)),
      launch_(launch_of_elastic_job()),
      generations_(generations_of(launch_, stop_)) {
  with_launcher(launch_, [&] { generations_.take_part(folder); });
  thread_ = start_thread<std::jthread>([this](const std::stop_token& end) { live(end); });
}

// Waits until nothing of the last generation is left.
ElasticJob::~ElasticJob() {
  comm::Job::of_this_process().wait_for_work_beside();
}

bool ElasticJob::enter() {
  comm::Generation now;
  with_launcher(launch_, [&] {
    for (now = generations_.newest(); !now.over && !now.index_of(launch_.member); now = generations_.newest()) {
      if (entered_) {
        throw Error("the others have gone on without process " + std::to_string(launch_.member) +
                        " of the job: it stood still for too long",
                    {Error::late});
      }
      if (stop_.stop_requested()) throw Stopped("stopped by request");
      generations_.join(launch_.member);
      std::this_thread::sleep_for(kLongestPauseOfEntering);
    }
  });
  if (now.over) return false;
  entered_ = true;
  const int count = static_cast<int>(now.members.size());
  if (count < launch_.fewest) {
    generations_.end();
    throw Error("the elastic job has " + std::to_string(count) + (count == 1 ? " process" : " processes") +
                    " left, and goes on with at least " + std::to_string(launch_.fewest),
                {Error::machine});
  }
  comm::Job::of_this_process().enter({comm::keys_of_generation(now.number), *now.index_of(launch_.member), count});
  const std::lock_guard lock(mutex_);
  newer_ = {};
  generation_ = now.number;
  return true;
}

void ElasticJob::leave() {
  with_launcher(launch_, [&] {
    generations_.leave(generation_, launch_.member);
    const auto begin = Clock::now();
    while (generations_.newest().number == generation_) {
      if (Clock::now() > begin + kUntilTheyLeft) generations_.keep_those_who_left(generation_);
      std::this_thread::sleep_for(comm::pause_after(Clock::now() - begin, kLongestPauseOfEntering));
    }
  });
}

void ElasticJob::note_beginning() {
  with_launcher(launch_, [&] { generations_of(launch_, stop_).note_beginning(generation_); });
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

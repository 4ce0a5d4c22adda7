#include "elastic_job.hpp"

#include <c10/util/Exception.h>
#include <lockstep/base/error.hpp>
#include <lockstep/ranks/rank.hpp>

#include "comm/processes/job.hpp"

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>
#include <utility>

namespace lockstep {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

constexpr auto kUntilTheyLeft = 2s;  // then those who have left go on together
constexpr auto kWatch = 50ms;        // between two looks for a newer generation
constexpr auto kPoll = 2ms;          // of one who waits for it

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

}  // namespace

bool ElasticJob::is_asked_for() {
  const auto launch = comm::Job::of_this_process().launch();
  return launch && launch->member >= 0;
}

ElasticJob::ElasticJob(std::stop_token stop)
    : stop_(std::move(stop)),
      launch_(launch_of_elastic_job()),
      generations_(rendezvous_of(launch_, stop_).connect(comm::kGenerations)) {
  generations_.take_part();
}

bool ElasticJob::enter() {
  watcher_ = {};
  try {
    for (now_ = generations_.newest(); !now_.over && !now_.index_of(launch_.member); now_ = generations_.newest()) {
      if (entered_) {
        throw Error("process " + std::to_string(launch_.member) +
                    " stood still for so long that the others have gone on without it");
      }
      if (stop_.stop_requested()) throw Stopped("stopped by request");
      generations_.join(launch_.member);
      std::this_thread::sleep_for(kPoll);
    }
  } catch (const c10::DistError&) {
    lose_launcher();
  }
  if (now_.over) return false;
  entered_ = true;
  const int count = static_cast<int>(now_.members.size());
  if (count < launch_.fewest) {
    generations_.end();
    throw Error("the elastic job has " + std::to_string(count) + (count == 1 ? " process" : " processes") +
                " left, and goes on with at least " + std::to_string(launch_.fewest));
  }
  comm::Job::of_this_process().enter({comm::keys_of_generation(now_.number), *now_.index_of(launch_.member), count});
  newer_ = {};
  watcher_ = std::jthread([this](const std::stop_token& end) { watch(end); });
  return true;
}

void ElasticJob::leave() {
  watcher_ = {};
  try {
    generations_.leave(now_.number, launch_.member);
    const auto deadline = Clock::now() + kUntilTheyLeft;
    while (generations_.newest().number == now_.number) {
      if (Clock::now() > deadline) generations_.keep_those_who_left(now_.number);
      std::this_thread::sleep_for(kPoll);
    }
  } catch (const c10::DistError&) {
    lose_launcher();
  }
}

void ElasticJob::note_beginning() {
  comm::Generations(rendezvous_of(launch_, stop_).connect(comm::kGenerations)).note_beginning(now_.number);
}

std::stop_token ElasticJob::newer() const {
  return newer_.get_token();
}

void ElasticJob::watch(const std::stop_token& end) {
  try {
    comm::Generations generations(rendezvous_of(launch_, stop_).connect(comm::kGenerations));
    std::mutex mutex;
    std::unique_lock lock(mutex);
    std::condition_variable_any ended;
    while (!end.stop_requested() && generations.newest().number == now_.number) {
      ended.wait_for(lock, end, kWatch, [] { return false; });
    }
    newer_.request_stop();
  } catch (const std::exception&) {  // the run itself finds out that the launcher is gone
  }
}

void ElasticJob::lose_launcher() const {
  throw Error("process " + std::to_string(launch_.member) +
              " of an elastic job: the launcher is gone: the store that it keeps does not answer");
}

}  // namespace lockstep

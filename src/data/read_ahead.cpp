#include "read_ahead.hpp"

#include <ATen/Parallel.h>

#include "base/rank_thread.hpp"
#include "base/start_thread.hpp"

#include <algorithm>
#include <utility>

namespace lockstep {

ReadAhead::ReadAhead(std::function<Dataset(const Numbers&)> read)
    : read_(std::move(read)), thread_(start_thread([this] { work(); })) {}

ReadAhead::~ReadAhead() {
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
  }
  changed_.notify_all();
  const InUserCode here("Samples::read (ahead)");  // the code of the other thread, for which this one waits
  thread_.join();
}

Dataset ReadAhead::take(const Numbers& numbers) {
  {
    std::unique_lock lock(mutex_);
    const auto found =
        std::find_if(parts_.begin(), parts_.end(), [&](const auto& part) { return part->numbers == numbers; });
    if (found != parts_.end()) {
      const std::shared_ptr<Part> part = *found;
      changed_.wait(lock, [&] { return part->state == Part::State::done; });
      parts_.remove(part);
      if (part->failure) std::rethrow_exception(part->failure);
      return std::move(part->samples);
    }
  }
  return read_(numbers);
}

void ReadAhead::want(const std::vector<Numbers>& next) {
  {
    const std::lock_guard lock(mutex_);
    std::list<std::shared_ptr<Part>> before = std::exchange(parts_, {});
    for (const auto& numbers : next) {
      const auto found =
          std::find_if(before.begin(), before.end(), [&](const auto& part) { return part->numbers == numbers; });
      parts_.push_back(found != before.end() ? *found : std::make_shared<Part>(Part{.numbers = numbers}));
    }
  }
  changed_.notify_all();
}

void ReadAhead::work() {
  at::init_num_threads();  // uses as many threads as ranks compute with
  std::unique_lock lock(mutex_);
  while (true) {
    const auto next = [&] {
      return std::find_if(parts_.begin(), parts_.end(),
                          [](const auto& part) { return part->state == Part::State::wanted; });
    };
    changed_.wait(lock, [&] { return ends_ || next() != parts_.end(); });
    if (ends_) return;
    const std::shared_ptr<Part> part = *next();
    part->state = Part::State::in_work;
    lock.unlock();
    Dataset samples;
    std::exception_ptr failure;
    try {
      samples = read_(part->numbers);
    } catch (...) {
      failure = std::current_exception();
    }
    lock.lock();
    part->samples = std::move(samples);
    part->failure = failure;
    part->state = Part::State::done;
    changed_.notify_all();
  }
}

}  // namespace lockstep

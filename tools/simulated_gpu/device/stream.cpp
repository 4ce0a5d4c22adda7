#include "stream.hpp"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <atomic>
#include <random>
#include <stdexcept>
#include <thread>

#include "graph.hpp"
#include "reports.hpp"
#include "settings.hpp"

namespace simulated {
namespace {

int next_number() {
  static std::atomic<int> count = 0;
  return count++;
}

}  // namespace

void Point::pass() {
  const std::lock_guard lock(mutex_);
  passed_ = true;
  time_ = std::chrono::steady_clock::now();
  changed_.notify_all();
}

void Point::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return passed_; });
}

bool Point::passed() {
  const std::lock_guard lock(mutex_);
  return passed_;
}

std::chrono::steady_clock::time_point Point::time() {
  const std::lock_guard lock(mutex_);
  return time_;
}

Stream::Stream(int device, int64_t id) : device(device), id(id), number(next_number()) {}

void Stream::queue(std::function<void()> task) {
  const std::lock_guard lock(mutex_);
  tasks_.push_back(std::move(task));
  if (!started_) {
    started_ = true;
    std::thread([this] { run(); }).detach();
  }
  changed_.notify_one();
}

std::shared_ptr<Point> Stream::mark() {
  if (recorder != nullptr) return recorder->mark(*this);
  join(clock, host_clock());
  auto point = std::make_shared<Point>(clock);
  queue([point] { point->pass(); });
  return point;
}

void Stream::follow(const std::shared_ptr<Point>& point) {
  if (recorder != nullptr || point->recorded) return Graph::follow(*this, point);
  join(clock, point->clock);
  queue([point] { point->wait(); });
}

void Stream::synchronize() {
  ++counts().host_waits;
  if (counts().warns_of_host_waits) TORCH_WARN("called a synchronizing CUDA operation");
  finish();
}

void Stream::finish() {
  std::shared_ptr<Point> point;
  {
    const std::lock_guard lock(order());
    Graph::check_wait(*this);
    point = mark();
  }
  point->wait();
  {
    const std::lock_guard lock(order());
    join(host_clock(), point->clock);
  }
  const std::lock_guard lock(mutex_);
  if (!failure_.empty()) throw std::runtime_error("simulated device " + std::to_string(device) + ": " + failure_);
}

bool Stream::idle() {
  const std::lock_guard lock(mutex_);
  return tasks_.empty() && !busy_;
}

std::string Stream::name() const {
  return "stream " + std::to_string(id) + " of device " + std::to_string(device);
}

void Stream::run() {
  at::set_num_threads(1);
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  std::minstd_rand random(static_cast<unsigned>(number) + 1);
  for (;;) {
    std::function<void()> task;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return !tasks_.empty(); });
      task = std::move(tasks_.front());
      tasks_.pop_front();
      busy_ = true;
    }
    if (const int delay = settings().delay_us; delay > 0) {
      std::this_thread::sleep_for(std::chrono::microseconds(random() % static_cast<unsigned>(delay)));
    }
    try {
      task();
    } catch (const std::exception& error) {
      report("a task on " + name() + " failed: " + error.what());
      const std::lock_guard lock(mutex_);
      if (failure_.empty()) failure_ = error.what();
    }
    task = nullptr;
    const std::lock_guard lock(mutex_);
    busy_ = false;
  }
}

}  // namespace simulated

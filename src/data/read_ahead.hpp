// ReadAhead: reads the next batches of one Batches on a thread, so that training does not wait for them.
//
//   1. It holds at most the batches that are wanted: want() names them, and drops all others.
//   2. If the function throws, the exception is kept in the place of the batch, and take() throws it.
//   3. The thread ends with the ReadAhead, which waits for a call of the function that is under way.
// Thread-safe.
#pragma once

#include <lockstep/data/samples.hpp>

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace lockstep {

class ReadAhead {
 public:
  using Numbers = std::vector<int64_t>;  // the numbers of samples

  explicit ReadAhead(std::function<Dataset(const Numbers&)> read);
  ~ReadAhead();
  ReadAhead& operator=(ReadAhead&&) = delete;

  // Returns the samples with these numbers. Waits for wanted samples, and reads others on the calling thread.
  Dataset take(const Numbers& numbers);

  // Names the batches that will be taken next, in this order.
  void want(const std::vector<Numbers>& next);

 private:
  struct Part {
    Numbers numbers;
    enum class State { wanted, in_work, done } state = State::wanted;
    Dataset samples = {};
    std::exception_ptr failure = {};
  };
  void work();

  const std::function<Dataset(const Numbers&)> read_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::list<std::shared_ptr<Part>> parts_;  // mutex_ guards the list, the parts, and `ends_`
  bool ends_ = false;
  std::thread thread_;  // stands last, since the thread uses all of the above
};

}  // namespace lockstep

// ReadAhead: a thread that reads the batches to come of one Batches, so that training does not wait for them.
//
//   1. At most as many batches lie there as are wanted: want() names them, and drops what is no longer among them.
//   2. What the function throws is kept in the place of the batch, and thrown by take().
//   3. The thread ends with the ReadAhead, which waits for the one call of the function that may be under way.
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
  using Numbers = std::vector<int64_t>;  // of samples

  explicit ReadAhead(std::function<Dataset(const Numbers&)> read);
  ~ReadAhead();
  ReadAhead(const ReadAhead&) = delete;
  ReadAhead& operator=(const ReadAhead&) = delete;

  // The samples of these numbers. If they are wanted, waits for them; else it reads them on the calling thread.
  Dataset take(const Numbers& numbers);

  // What will be taken next, in this order.
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
  std::list<std::shared_ptr<Part>> parts_;  // guarded by mutex_, as what they hold and `ends_`
  bool ends_ = false;
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace lockstep

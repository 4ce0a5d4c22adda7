// Keeps the ranks of this process that have not ended, and which code of the user each is in. It is thread-safe.
#pragma once

#include <lockstep/devices/devices.hpp>

#include "base/rank_thread.hpp"
#include "base/seconds.hpp"
#include "comm/failure.hpp"
#include "comm/texts.hpp"

#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>

namespace lockstep {

class OpenRanks {
 public:
  OpenRanks(const Devices& devices, std::chrono::milliseconds timeout) : devices_(devices), timeout_(timeout) {}

  UserCode& add(int rank) {
    const std::lock_guard lock(mutex_);
    open_.insert(rank);
    return codes_[rank];  // the code stays: the rank's thread may look there to its very end
  }

  void end(int rank) {
    const std::lock_guard lock(mutex_);
    open_.erase(rank);
    changed_.notify_all();
  }

  // Gives "rank 1 (cpu) has been in …" for the ranks for which another may have waited too long. They may have come
  // there later.
  std::string standing() const {
    const std::lock_guard lock(mutex_);
    std::string text;
    for (const int rank : open_) add_to(text, rank, codes_.at(rank).text(timeout_ / 2));
    return text;
  }

  // Waits until all ranks have ended. Tells once of each rank that stands still: after the timeout if others may wait
  // for that rank, or soon after `why` has a reason to end the run.
  void wait(const std::function<comm::Failure()>& why, const std::function<void(const std::string&)>& tell) {
    bool ended_before = false;
    std::set<int> told;
    while (true) {
      std::string text;
      {
        std::unique_lock lock(mutex_);
        if (changed_.wait_for(lock, kPatience, [&] { return open_.empty(); })) return;
        const comm::Failure reason = why();
        const bool ends = std::exchange(ended_before, !reason.empty()) && !reason.empty();
        if (!ends && devices_.size() == 1) continue;
        for (const int rank : open_) {
          std::string code = codes_.at(rank).text(ends ? kPatience : timeout_);
          const bool may_write_a_checkpoint = reason.is(Error::stopped);
          if (code.empty() && ends && !may_write_a_checkpoint) code = "has not returned";
          if (!code.empty() && told.insert(rank).second) add_to(text, rank, code);
        }
        if (!text.empty())
          text += ends ? ", and run() waits for it. Then it ends: " + reason.text
                       : ". Ranks that wait for it give up after " + comm::seconds(timeout_);
      }
      if (!text.empty()) tell(text);
    }
  }

 private:
  static constexpr std::chrono::milliseconds kPatience{500};

  void add_to(std::string& text, int rank, const std::string& code) const {
    if (!code.empty()) text += (text.empty() ? "" : ", and ") + comm::name_of(rank, devices_) + " " + code;
  }

  const Devices& devices_;
  const std::chrono::milliseconds timeout_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::map<int, UserCode> codes_;  // guarded by mutex_, as the next one
  std::set<int> open_;
};

}  // namespace lockstep

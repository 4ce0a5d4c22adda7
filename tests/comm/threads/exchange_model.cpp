// A model of Exchange's call (src/comm/threads/exchange.cpp): how ranks post, take shares, and wait. Relacy runs it
// under C++'s memory model, in thousands of interleavings, and finds data races, lost wake-ups and reads of old values.
//
// Each function here has the name of the one that it models, and makes the same accesses in the same order. Whoever
// changes an atomic, a lock or their order there, changes it here. Each planted bug must be found.
#include <relacy/relacy.hpp>

#include <cstdio>
#include <sstream>

namespace {

constexpr int kRanks = 3, kShares = 2, kTurnsOfSpin = 2;

enum class Bug {
  kNone,
  kPostedIsRelaxed,
  kPostedIsSetEarly,
  kFinishedSharesAreRelaxed,
  kCompleteIsRelaxed,
  kShareIsTakenTwice,
  kWakesWithoutTheLock,
};

template <Bug kBug>
class Model : public rl::test_suite<Model<kBug>, kRanks> {
 public:
  Model() : posts_(0), posted_(false), next_share_(0), finished_shares_(0), complete_(false) {}

  void thread(unsigned rank) {
    in_[rank]($) = 1;
    post();
    wait();
    for (auto& out : out_) RL_ASSERT(out($) == kRanks);
    RL_ASSERT(done_($) == 1);
    in_[rank]($) = 0;  // the rank's tensor is its own again
  }

 private:
  static constexpr rl::memory_order order(Bug relaxed) { return kBug == relaxed ? rl::mo_relaxed : rl::mo_seq_cst; }

  void post() {
    mutex_.lock($);
    if (kBug == Bug::kPostedIsSetEarly && posts_($) + 2 == kRanks) posted_($).store(true, rl::mo_seq_cst);
    posts_($) = posts_($) + 1;
    if (posts_($) == kRanks) {
      posted_($).store(true, order(Bug::kPostedIsRelaxed));
      changed_.notify_all($);
    }
    mutex_.unlock($);
  }

  void wait() {
    work();
    for (int turn = 0; turn < kTurnsOfSpin && !complete(); ++turn) work();
    if (!complete()) sleep();
  }

  void sleep() {
    mutex_.lock($);
    while (!complete()) {
      if (has_work()) {
        mutex_.unlock($);
        work();
        mutex_.lock($);
        continue;
      }
      changed_.wait(mutex_, $);
    }
    mutex_.unlock($);
  }

  bool complete() { return complete_($).load(order(Bug::kCompleteIsRelaxed)); }

  bool has_work() {
    return posted_($).load(order(Bug::kPostedIsRelaxed)) && next_share_($).load(rl::mo_seq_cst) < kShares;
  }

  int take_share() {
    if (kBug != Bug::kShareIsTakenTwice) return next_share_($).fetch_add(1, rl::mo_seq_cst);
    const int share = next_share_($).load(rl::mo_seq_cst);
    next_share_($).store(share + 1, rl::mo_seq_cst);
    return share;
  }

  void work() {
    while (has_work()) {
      const int share = take_share();
      if (share >= kShares) return;
      int sum = 0;
      for (auto& in : in_) sum += in($);
      out_[share]($) = sum;
      if (finished_shares_($).fetch_add(1, order(Bug::kFinishedSharesAreRelaxed)) + 1 == kShares) finish();
    }
  }

  void finish() {
    done_($) = 1;
    complete_($).store(true, order(Bug::kCompleteIsRelaxed));
    if (kBug != Bug::kWakesWithoutTheLock) mutex_.lock($);
    changed_.notify_all($);
    if (kBug != Bug::kWakesWithoutTheLock) mutex_.unlock($);
  }

  rl::var<int> in_[kRanks], out_[kShares], done_;
  rl::mutex mutex_;
  rl::condition_variable_any changed_;
  rl::var<int> posts_;
  rl::atomic<bool> posted_;
  rl::atomic<int> next_share_, finished_shares_;
  rl::atomic<bool> complete_;
};

// Whether all goes as it should: the model is right, or its bug is found.
template <Bug kBug>
bool check(const char* what) {
  std::ostringstream log;
  rl::test_params params;
  params.iteration_count = 100'000;
  params.output_stream = &log;
  params.progress_stream = &log;
  const bool right = rl::simulate<Model<kBug>>(params);
  const bool as_wanted = right == (kBug == Bug::kNone);
  std::printf("%s: %s after %d runs\n", what, right ? "nothing found" : rl::test_result_str(params.test_result),
              static_cast<int>(params.stop_iteration));
  if (!as_wanted) std::printf("%s", log.str().c_str());
  return as_wanted;
}

}  // namespace

int main() {
  bool good = check<Bug::kNone>("no bug");
  good &= check<Bug::kPostedIsRelaxed>("`posted_` is relaxed");
  good &= check<Bug::kPostedIsSetEarly>("`posted_` is set before the last rank's post");
  good &= check<Bug::kFinishedSharesAreRelaxed>("`finished_shares_` is relaxed");
  good &= check<Bug::kCompleteIsRelaxed>("`complete_` is relaxed");
  good &= check<Bug::kShareIsTakenTwice>("two ranks take one share");
  good &= check<Bug::kWakesWithoutTheLock>("sleepers are woken without the lock");
  return good ? 0 : 1;
}

// A model of Exchange's call (src/comm/threads/exchange.cpp): how ranks post, take shares, and wait. Relacy runs it
// under C++'s memory model, in thousands of interleavings, and finds data races, lost wake-ups and reads of old values.
//
// Each function here has the name of the one that it models, and makes the same accesses in the same order. Whoever
// changes an atomic, a lock or an order there changes it here. Each planted bug must be found.
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
  kEarlierIsNotAwaited,
};

// Each rank makes two calls on its tensor and waits for the second one alone.
template <Bug kBug>
class Model : public rl::test_suite<Model<kBug>, kRanks> {
 public:
  void thread(unsigned rank) {
    for (auto& value : tensors_[rank]) value($) = 1;
    for (auto& call : calls_) post(call);
    wait(calls_[1], calls_[0]);
    for (auto& value : tensors_[rank]) RL_ASSERT(value($) == kRanks * kRanks);
    for (auto& call : calls_) RL_ASSERT(call.done_($) == 1);
    for (auto& value : tensors_[rank]) value($) = 0;  // the rank's tensor is its own again
  }

 private:
  struct Operation {
    Operation() : posts_(0), posted_(false), next_share_(0), finished_shares_(0), complete_(false) {}
    rl::var<int> posts_, done_;
    rl::atomic<bool> posted_;
    rl::atomic<int> next_share_, finished_shares_;
    rl::atomic<bool> complete_;
  };

  static constexpr rl::memory_order order(Bug relaxed) { return kBug == relaxed ? rl::mo_relaxed : rl::mo_seq_cst; }

  void post(Operation& call) {
    mutex_.lock($);
    if (kBug == Bug::kPostedIsSetEarly && call.posts_($) + 2 == kRanks) call.posted_($).store(true, rl::mo_seq_cst);
    call.posts_($) = call.posts_($) + 1;
    if (call.posts_($) == kRanks) {
      call.posted_($).store(true, order(Bug::kPostedIsRelaxed));
      changed_.notify_all($);
    }
    mutex_.unlock($);
  }

  void wait(Operation& call, Operation& earlier) {
    work(call, earlier);
    for (int turn = 0; turn < kTurnsOfSpin && !complete(call); ++turn) work(call, earlier);
    if (!complete(call)) sleep(call, earlier);
  }

  void sleep(Operation& call, Operation& earlier) {
    mutex_.lock($);
    while (!complete(call)) {
      if (has_work(call) && !is_held_up(earlier)) {
        mutex_.unlock($);
        work(call, earlier);
        mutex_.lock($);
        continue;
      }
      changed_.wait(mutex_, $);
    }
    mutex_.unlock($);
  }

  bool posted(Operation& call) { return call.posted_($).load(order(Bug::kPostedIsRelaxed)); }
  bool complete(Operation& call) { return call.complete_($).load(order(Bug::kCompleteIsRelaxed)); }
  bool has_work(Operation& call) { return posted(call) && call.next_share_($).load(rl::mo_seq_cst) < kShares; }
  bool is_held_up(Operation& earlier) { return posted(earlier) && !complete(earlier) && !has_work(earlier); }

  int take_share(Operation& call) {
    if (kBug != Bug::kShareIsTakenTwice) return call.next_share_($).fetch_add(1, rl::mo_seq_cst);
    const int share = call.next_share_($).load(rl::mo_seq_cst);
    call.next_share_($).store(share + 1, rl::mo_seq_cst);
    return share;
  }

  void work(Operation& call, Operation& earlier) {
    if (!has_work(call) && !complete(call)) return;
    if (posted(earlier)) {
      work(earlier);
      if (kBug != Bug::kEarlierIsNotAwaited && !complete(earlier)) return;
    }
    work(call);
  }

  void work(Operation& call) {
    while (has_work(call)) {
      const int share = take_share(call);
      if (share >= kShares) return;
      int sum = 0;
      for (auto& tensor : tensors_) sum += tensor[share]($);
      for (auto& tensor : tensors_) tensor[share]($) = sum;
      if (call.finished_shares_($).fetch_add(1, order(Bug::kFinishedSharesAreRelaxed)) + 1 == kShares) finish(call);
    }
  }

  void finish(Operation& call) {
    call.done_($) = 1;
    call.complete_($).store(true, order(Bug::kCompleteIsRelaxed));
    if (kBug != Bug::kWakesWithoutTheLock) mutex_.lock($);
    changed_.notify_all($);
    if (kBug != Bug::kWakesWithoutTheLock) mutex_.unlock($);
  }

  rl::var<int> tensors_[kRanks][kShares];
  rl::mutex mutex_;
  rl::condition_variable_any changed_;
  Operation calls_[2];
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
  good &= check<Bug::kEarlierIsNotAwaited>("a call begins while the one before it is under way");
  return good ? 0 : 1;
}

// Labels: concurrency
// A pipeline's messages: the order for all ranks, and the mail that posts them.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <lockstep/ranks/rank.hpp>

#include "pipeline/pipeline_mail.hpp"
#include "pipeline/pipeline_messages.hpp"
#include "support/test_devices.hpp"

#include <algorithm>
#include <functional>
#include <mutex>
#include <utility>
#include <vector>

namespace pipeline_mail_test {

using lockstep::messages_of;
using lockstep::PipelineMail;
using lockstep::PipelineMessages;
using lockstep::PipelineSchedule;
using lockstep::PipelineStep;
using lockstep::PipelineTie;
using lockstep::Rank;
using torch::Tensor;
using AllSteps = std::vector<std::vector<PipelineStep>>;

AllSteps all_steps(PipelineSchedule schedule, int ranks, int stages_per_rank, int microbatches) {
  AllSteps steps;
  for (int rank = 0; rank < ranks; ++rank) {
    steps.push_back(steps_of(schedule, rank, ranks, stages_per_rank, microbatches));
  }
  return steps;
}

template <class Check>
void for_all(int most_ranks, int most_microbatches, Check&& check) {
  for (const auto schedule : {PipelineSchedule::gpipe, PipelineSchedule::one_f_one_b, PipelineSchedule::interleaved}) {
    for (int ranks = 1; ranks <= most_ranks; ++ranks) {
      for (int stages = 1; stages <= (schedule == PipelineSchedule::interleaved ? 3 : 1); ++stages) {
        for (int microbatches = 1; microbatches <= most_microbatches; ++microbatches) {
          SCOPED_TRACE(testing::Message() << to_string(schedule) << ", " << ranks << " ranks of " << stages
                                          << " stages, " << microbatches << " microbatches");
          check(all_steps(schedule, ranks, stages, microbatches), ranks * stages, microbatches);
        }
      }
    }
  }
}

// One rank of a machine on which a posted message holds up all that the rank posts behind it, until the other side's
// has come to the front too.
struct Host {
  PipelineMessages plan;
  size_t steps = 0;    // there are
  size_t step = 0;     // now
  int posted = 0;      // messages
  int passed = 0;      // messages that are through
  bool needs = false;  // posted what the step needs

  void post_up_to(int message) { posted = std::max(posted, message + 1); }
  // Goes on as far as the host comes without waiting; gives whether it moved.
  bool go_on() {
    const size_t before = 2 * step + (needs ? 1 : 0);
    while (step < steps) {
      int needed = plan.needed[step];
      for (const int tie : plan.ties_needed[step]) needed = std::max(needed, tie);
      if (!needs && needed >= 0) post_up_to(needed);
      needs = true;
      if (needed >= passed) break;
      std::vector<int> made = plan.ties_made[step];
      if (plan.made[step] >= 0) made.insert(made.begin(), plan.made[step]);
      for (const int message : made) {
        EXPECT_GE(message, posted) << "posted before it was made";
        post_up_to(message);
      }
      needs = false;
      ++step;
    }
    return 2 * step + (needs ? 1 : 0) != before;
  }
};

// The last stage borrows from the first one, and from the second.
std::vector<PipelineTie> ties_of(int stages) {
  std::vector<PipelineTie> ties;
  for (int owner = 0; owner < std::min(2, stages - 1); ++owner) ties.push_back({owner, stages - 1});
  return ties;
}

void expect_no_wait_for_itself(const std::function<std::vector<PipelineTie>(int stages)>& ties) {
  for_all(6, 13, [&](const AllSteps& steps, int stages, int) {
    const auto ranks = static_cast<int>(steps.size());
    auto between_ranks = ties(stages);  // a rank posts nothing to itself
    std::erase_if(between_ranks, [&](const auto& tie) { return tie.owner % ranks == tie.borrower % ranks; });
    std::vector<Host> hosts;
    for (size_t rank = 0; rank < steps.size(); ++rank) {
      hosts.push_back({messages_of(static_cast<int>(rank), steps, stages, between_ranks), steps[rank].size()});
    }
    if (hosts.size() == 1) return;  // it has no messages to others
    for (bool moved = true; moved;) {
      moved = false;
      for (auto& host : hosts) moved = host.go_on() || moved;
      for (size_t rank = 0; rank < hosts.size(); ++rank) {
        auto& host = hosts[rank];
        if (host.passed == host.posted) continue;
        const auto& mine = host.plan.messages[host.passed];
        auto& peer = hosts[mine.peer];
        if (peer.passed == peer.posted) continue;
        const auto& theirs = peer.plan.messages[peer.passed];
        if (theirs.peer != static_cast<int>(rank) || theirs.sent == mine.sent) continue;
        ASSERT_EQ(theirs.step, mine.their_step);
        ASSERT_EQ(theirs.their_step, mine.step);
        ++host.passed, ++peer.passed;
        moved = true;
      }
    }
    for (const auto& host : hosts) {
      ASSERT_EQ(host.step, host.steps);
      ASSERT_EQ(host.passed, static_cast<int>(host.plan.messages.size()));
    }
  });
}

TEST(PipelineMessagesTest, TheOneOrderNeverWaitsForItself) {
  expect_no_wait_for_itself([](int) { return std::vector<PipelineTie>(); });
  expect_no_wait_for_itself(ties_of);
}

// With one microbatch in flight per direction, all but a few messages are known to have arrived before the end.
TEST(PipelineMessagesTest, WhatAnAnswerProvesHasArrived) {
  const auto steps = all_steps(PipelineSchedule::one_f_one_b, 4, 1, 16);
  for (int rank = 0; rank < 4; ++rank) {
    const auto plan = messages_of(rank, steps, 4);
    int sent = 0, arrived = 0;
    for (const auto& message : plan.messages) sent += message.sent ? 1 : 0;
    for (size_t step = 0; step < plan.arrived.size(); ++step) {
      for (const int index : plan.arrived[step]) {
        const auto& answer = plan.messages[plan.needed[step]];
        EXPECT_EQ(answer.peer, plan.messages[index].peer);
        EXPECT_LE(plan.messages[index].their_step, answer.their_step);
        EXPECT_LT(plan.messages[index].step, static_cast<int>(step));
        ++arrived;
      }
    }
    EXPECT_GE(arrived, sent - 4) << "rank " << rank;
  }
}

// Expects what a stage's backward gets of the ties that it owns: `base`, and the tie's number.
void expect_ties(const std::vector<std::pair<int, Tensor>>& taken, const std::vector<PipelineTie>& ties, int stage,
                 const Tensor& base) {
  size_t next = 0;
  for (int tie = 0; tie < static_cast<int>(ties.size()); ++tie) {
    if (ties[static_cast<size_t>(tie)].owner != stage) continue;
    ASSERT_LT(next, taken.size());
    EXPECT_EQ(taken[next].first, tie);
    EXPECT_TRUE(torch::equal(taken[next].second, base + tie));
    ++next;
  }
  EXPECT_EQ(next, taken.size());
}

// Numbers instead of activations: a stage adds its number to what comes, and multiplies gradients by the number.
TEST(PipelineMailTest, EveryStepGetsWhatItNeedsInEitherOrderOfPosts) {
  const auto numbers = [](double value) { return torch::full({3}, value, torch::kDouble); };
  for (const bool in_order : {false, true}) {
    for_all(4, 6, [&](const AllSteps& steps, int stages, int microbatches) {
      lockstep::run(lockstep::test_devices(steps.size()), [&](Rank& rank) {
        const auto ties = ties_of(stages);
        const auto plan = messages_of(rank.index(), steps, stages, ties);
        PipelineMail mail(
            rank, plan, [&](const auto&) { return numbers(-1); }, in_order);
        const auto& mine = steps[rank.index()];
        for (int i = 0; i < static_cast<int>(mine.size()); ++i) {
          const Tensor taken = mail.take(i);
          const int stage = mine[i].stage, microbatch = mine[i].microbatch;
          const bool forward = mine[i].kind == PipelineStep::Kind::forward;
          const bool end = stage == (forward ? 0 : stages - 1);
          ASSERT_EQ(taken.defined(), !end);
          // Sums of the stages before, or of this one and those behind: with 100 per microbatch no two are equal.
          double expected = 100 * microbatch + (forward ? 0.25 : 0.5);
          for (int s = 0; s < stages; ++s) expected += (forward ? s < stage : s > stage) ? s + 1 : 0;
          if (!end) {
            EXPECT_TRUE(torch::equal(taken, numbers(expected)));
          }
          if (!forward) expect_ties(mail.take_ties(i), ties, stage, numbers(1000 * microbatch));
          if (stage == (forward ? stages - 1 : 0)) continue;
          mail.give(i, numbers(expected + stage + 1));
          for (size_t tie = 0; tie < ties.size(); ++tie) {
            if (!forward && ties[tie].borrower == stage)
              mail.give_tie(i, int(tie), numbers(1000 * microbatch) + int(tie));
          }
        }
        mail.finish();
      });
    });
  }
}

// A GPU's receive begins once all is done that was queued before it. So a receive is posted before the step before
// computes, if it does not come behind a message of that step in the one order.
TEST(PipelineMailTest, InOrderReceivesArePostedAStepBeforeTheyAreNeeded) {
  const auto numbers = [] { return torch::zeros({3}, torch::kDouble); };
  int early = 0, all = 0;
  for_all(4, 6, [&](const AllSteps& steps, int stages, int) {
    std::mutex mutex;
    lockstep::run(lockstep::test_devices(steps.size()), [&](Rank& rank) {
      const auto plan = messages_of(rank.index(), steps, stages);
      std::vector<bool> posted(steps[rank.index()].size());
      PipelineMail mail(
          rank, plan,
          [&](const auto& message) {
            posted[message.step] = true;
            return numbers();
          },
          /*in_order=*/true);
      for (int i = 0; i < static_cast<int>(posted.size()); ++i) {
        mail.take(i);
        const int next = i + 1 < static_cast<int>(posted.size()) ? plan.needed[i + 1] : -1;
        if (next >= 0 && plan.messages[next].peer != rank.index()) {
          const bool comes_first = plan.made[i] < 0 || next < plan.made[i];
          EXPECT_TRUE(posted[i + 1] || !comes_first) << "rank " << rank.index() << ", step " << i;
          const std::lock_guard lock(mutex);
          ++all;
          early += comes_first ? 1 : 0;
        }
        if (plan.made[i] >= 0) mail.give(i, numbers());
      }
      mail.finish();
    });
  });
  EXPECT_GT(early, all / 2);
}

TEST(PipelineMailTest, AnAnnouncementReachesAll) {
  for (const bool early : {false, true}) {
    for (int speaker = 0; speaker < 3; ++speaker) {
      lockstep::run(lockstep::test_devices(3), [&](Rank& rank) {
        lockstep::Announcement announcement(rank, speaker, /*count=*/2, early);
        const torch::Tensor heard = announcement.exchange(torch::tensor({rank.index() + 0.5, -1.0}, torch::kDouble));
        EXPECT_TRUE(heard.equal(torch::tensor({speaker + 0.5, -1.0}, torch::kDouble))) << heard;
      });
    }
  }
}

}  // namespace pipeline_mail_test

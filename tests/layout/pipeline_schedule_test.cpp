// Schedules: all ranks' steps simulated, each rank waiting for what a step needs.
#include <gmock/gmock.h>
#include <lockstep/base/error.hpp>
#include <lockstep/layout/pipeline_schedule.hpp>

#include "support/error_of.hpp"

#include <algorithm>
#include <map>
#include <tuple>
#include <vector>

namespace pipeline_schedule_test {

using lockstep::error_of;
using lockstep::PipelineSchedule;
using lockstep::PipelineStep;
using lockstep::Refused;
using lockstep::steps_of;
using Kind = PipelineStep::Kind;

// The outcome of a schedule whose steps take one unit of time each, and whose messages take none.
struct Outcome {
  bool complete = false;
  double idle_share = 0;   // idle share of all ranks
  std::vector<int> peaks;  // per rank: microbatches whose forward is done and whose backward is not, summed over stages
};

Outcome simulate(PipelineSchedule schedule, int ranks, int stages_per_rank, int microbatches) {
  std::vector<std::vector<PipelineStep>> steps;
  for (int rank = 0; rank < ranks; ++rank) {
    steps.push_back(steps_of(schedule, rank, ranks, stages_per_rank, microbatches));
  }
  const int last_stage = ranks * stages_per_rank - 1;
  std::map<std::tuple<Kind, int, int>, int> end;  // ends of the steps that are done
  std::vector<size_t> done(ranks);
  std::vector<int> now(ranks), live(ranks);
  Outcome outcome;
  outcome.peaks.resize(ranks);

  const auto ready = [&](const PipelineStep& step) {  // when its needs are met, or -1
    std::vector<std::tuple<Kind, int, int>> needs;
    const bool forward = step.kind == Kind::forward;
    if (forward && step.stage > 0) needs.emplace_back(Kind::forward, step.microbatch, step.stage - 1);
    if (!forward) needs.emplace_back(Kind::forward, step.microbatch, step.stage);
    if (!forward && step.stage < last_stage) needs.emplace_back(Kind::backward, step.microbatch, step.stage + 1);
    int time = 0;
    for (const auto& need : needs) {
      if (end.count(need) == 0) return -1;
      time = std::max(time, end[need]);
    }
    return time;
  };
  for (bool moved = true; moved;) {
    moved = false;
    for (int rank = 0; rank < ranks; ++rank) {
      while (done[rank] < steps[rank].size()) {
        const auto& step = steps[rank][done[rank]];
        const int time = ready(step);
        if (time < 0) break;
        EXPECT_EQ(step.stage % ranks, rank);
        now[rank] = std::max(now[rank], time) + 1;
        EXPECT_TRUE(end.emplace(std::tuple(step.kind, step.microbatch, step.stage), now[rank]).second) << "twice";
        live[rank] += step.kind == Kind::forward ? 1 : -1;
        outcome.peaks[rank] = std::max(outcome.peaks[rank], live[rank]);
        ++done[rank];
        moved = true;
      }
    }
  }
  const int all = 2 * microbatches * stages_per_rank;
  outcome.complete =
      std::all_of(done.begin(), done.end(), [&](size_t count) { return static_cast<int>(count) == all; });
  outcome.idle_share = 1 - static_cast<double>(all) / *std::max_element(now.begin(), now.end());
  return outcome;
}

template <class Check>
void for_all(PipelineSchedule schedule, int most_stages_per_rank, Check&& check) {
  for (int ranks = 1; ranks <= 8; ++ranks) {
    for (int stages = 1; stages <= most_stages_per_rank; ++stages) {
      for (int microbatches = 1; microbatches <= 17; ++microbatches) {
        SCOPED_TRACE(testing::Message() << to_string(schedule) << ", " << ranks << " ranks of " << stages << " stages, "
                                        << microbatches << " microbatches");
        check(ranks, stages, microbatches, simulate(schedule, ranks, stages, microbatches));
      }
    }
  }
}

TEST(PipelineScheduleTest, GPipeCompletesAndIdlesAsTheFormulaSays) {
  for_all(PipelineSchedule::gpipe, 1, [](int ranks, int stages, int microbatches, const Outcome& outcome) {
    ASSERT_TRUE(outcome.complete);
    EXPECT_NEAR(outcome.idle_share, ideal_idle_share(PipelineSchedule::gpipe, ranks, stages, microbatches), 1e-12);
    EXPECT_EQ(outcome.peaks, std::vector<int>(ranks, microbatches));
  });
}

TEST(PipelineScheduleTest, OneForwardOneBackwardIdlesAsMuchAndKeepsLess) {
  for_all(PipelineSchedule::one_f_one_b, 1, [](int ranks, int stages, int microbatches, const Outcome& outcome) {
    ASSERT_TRUE(outcome.complete);
    EXPECT_NEAR(outcome.idle_share, ideal_idle_share(PipelineSchedule::one_f_one_b, ranks, stages, microbatches),
                1e-12);
    for (int rank = 0; rank < ranks; ++rank) EXPECT_LE(outcome.peaks[rank], std::min(ranks - rank, microbatches));
  });
}

TEST(PipelineScheduleTest, InterleavedCompletesForAnyCountAndIdlesLess) {
  for_all(PipelineSchedule::interleaved, 4, [](int ranks, int stages, int microbatches, const Outcome& outcome) {
    ASSERT_TRUE(outcome.complete);
    const double ideal = ideal_idle_share(PipelineSchedule::interleaved, ranks, stages, microbatches);
    if (microbatches % ranks == 0) {
      EXPECT_NEAR(outcome.idle_share, ideal, 1e-12);
    } else {
      EXPECT_GE(outcome.idle_share, ideal - 1e-12);
    }
    // Megatron's bound, in stages' activations.
    for (int rank = 0; rank < ranks; ++rank) {
      EXPECT_LE(outcome.peaks[rank],
                std::min(2 * (ranks - rank - 1) + (stages - 1) * ranks + 1, stages * microbatches));
    }
  });
}

TEST(PipelineScheduleTest, NamesGoBothWays) {
  for (const auto schedule : {PipelineSchedule::gpipe, PipelineSchedule::one_f_one_b, PipelineSchedule::interleaved}) {
    EXPECT_EQ(lockstep::schedule_from(to_string(schedule)), schedule);
  }
  EXPECT_EQ(to_string(PipelineSchedule::one_f_one_b), "1f1b");
  EXPECT_THAT(error_of([] { lockstep::schedule_from("1F1B"); }), Refused());
}

TEST(PipelineScheduleTest, WhatCannotBeIsRefused) {
  EXPECT_THAT(error_of([] { steps_of(PipelineSchedule::gpipe, 2, 2, 1, 4); }), Refused());
  EXPECT_THAT(error_of([] { steps_of(PipelineSchedule::gpipe, -1, 2, 1, 4); }), Refused());
  EXPECT_THAT(error_of([] { steps_of(PipelineSchedule::gpipe, 0, 0, 1, 4); }), Refused());
  EXPECT_THAT(error_of([] { steps_of(PipelineSchedule::gpipe, 0, 2, 1, 0); }), Refused());
  EXPECT_THAT(error_of([] { steps_of(PipelineSchedule::interleaved, 0, 2, 0, 1); }), Refused());
  EXPECT_THAT(error_of([] { steps_of(PipelineSchedule::one_f_one_b, 0, 2, 2, 4); }), Refused());
  EXPECT_THAT(error_of([] { ideal_idle_share(PipelineSchedule::gpipe, 2, 1, -3); }), Refused());
}

}  // namespace pipeline_schedule_test

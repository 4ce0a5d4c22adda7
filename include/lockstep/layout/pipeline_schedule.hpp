// Schedules of a pipeline: each orders a rank's forwards and backwards of its stages.
//
// A network's layers are cut into stages; stage s lives on rank s % ranks. A batch is cut into microbatches, so that
// ranks compute different ones at once. The functions are pure, thread-safe and without LibTorch. For S ranks, v stages
// per rank and M microbatches, with stages of equal length:
//   gpipe        all forwards, then all backwards; keeps M microbatches' activations (Huang et al. 2019)
//   one_f_one_b  a backward as soon as possible; rank r keeps min(S - r, M) microbatches' (Narayanan et al. 2019)
//   interleaved  as one_f_one_b, with v shorter stages per rank: idle for 1/v of the time, v times the messages
//                (Megatron-LM: Narayanan et al. 2021)
#pragma once

#include <string_view>
#include <vector>

namespace lockstep {

enum class PipelineSchedule { gpipe, one_f_one_b, interleaved };

// Returns the schedule's name: "gpipe", "1f1b" or "interleaved".
std::string_view to_string(PipelineSchedule schedule);
// Returns the schedule with this name. Throws Error, which lists the schedules, for any other name.
PipelineSchedule schedule_from(std::string_view name);

// Describes one stage's forward or backward of one microbatch.
struct PipelineStep {
  enum class Kind { forward, backward };

  Kind kind;
  int microbatch;  // 0 … microbatches - 1
  int stage;       // 0 … ranks * stages_per_rank - 1

  bool operator==(const PipelineStep&) const = default;
};

// Returns the steps of rank `rank` of `ranks` in order: each of its stages has one forward and one backward of every
// microbatch. A forward needs the same microbatch's forward in the stage before. A backward needs its own stage's
// forward, and the backward in the stage behind. If every rank does its steps in order, and waits for each step's
// inputs, all complete: the orders hold no deadlock. Throws Error for a rank outside of 0 … ranks - 1, a count below 1,
// or more than one stage per rank with a schedule other than interleaved.
std::vector<PipelineStep> steps_of(PipelineSchedule schedule, int rank, int ranks, int stages_per_rank,
                                   int microbatches);

// Returns the share of time in which a rank waits, if all stages take equally long and messages take no time. For gpipe
// and one_f_one_b it is (S - 1) / (M + S - 1). For interleaved it is (S - 1) / (v M + S - 1), if M is a multiple of S.
// Throws Error as steps_of does.
double ideal_idle_share(PipelineSchedule schedule, int ranks, int stages_per_rank, int microbatches);

}  // namespace lockstep

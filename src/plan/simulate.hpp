// A pipeline's step, played event by event: who computes what when, and who waits.
//
// The ranks do steps_of()'s steps in order, as Pipeline does; messages travel beside the computing, one at a time
// between two stages in each direction. Ranks of a node that compute at once may slow each other down. No LibTorch, no
// state.
#pragma once

#include <lockstep/layout/pipeline_schedule.hpp>

#include <functional>
#include <vector>

namespace lockstep {

struct PipelineRun {
  struct Stage {
    double forward = 0;  // seconds of computing per microbatch on its device, while nobody else computes
    double backward = 0;
    double forward_messages = 0;  // seconds in collectives with other ranks, after the computing, per microbatch
    double backward_messages = 0;
    double send_forward = 0;   // seconds of a microbatch's way to the next stage,
    double send_backward = 0;  // and to the one before
  };

  PipelineSchedule schedule = PipelineSchedule::one_f_one_b;
  int ranks = 1;
  int stages_per_rank = 1;
  int microbatches = 1;
  std::vector<Stage> stages;  // ranks * stages_per_rank; stage s lives on rank s % ranks
  std::vector<int> node;      // of each rank: those of one node slow each other down. Empty: each has its own
  int copies = 1;             // of this pipeline that run beside it on the same nodes, itself included
  std::function<double(double computing)> slowdown = {};  // of each, if so many of a node compute; none: always 1
};

struct PipelineTimes {
  double seconds = 0;          // until all ranks are done
  std::vector<double> finish;  // of each rank: when its last step is done,
  std::vector<double> busy;    // and the seconds that it computed
};

// Takes about ranks * microbatches * stages steps. Throws Error as steps_of().
PipelineTimes simulate(const PipelineRun& run);

}  // namespace lockstep

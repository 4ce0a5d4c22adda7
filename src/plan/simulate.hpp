// A pipeline's step, played event by event: who computes what when, and who waits.
//
// The ranks do steps_of()'s steps in order, as Pipeline does. Messages travel while ranks compute, one at a time
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
    double forward_messages = 0;  // seconds per microbatch in collectives with other ranks, after the computing
    double backward_messages = 0;
    double send_forward = 0;   // seconds that a microbatch takes to the next stage
    double send_backward = 0;  // seconds that a microbatch takes to the stage before
  };

  PipelineSchedule schedule = PipelineSchedule::one_f_one_b;
  int ranks = 1;
  int stages_per_rank = 1;
  int microbatches = 1;
  std::vector<Stage> stages;  // ranks * stages_per_rank; stage s lives on rank s % ranks
  std::vector<int> node;      // by rank: ranks of one node slow each other down. Empty: each has its own
  int copies = 1;             // how many such pipelines run on the same nodes, this one included
  std::function<double(double computing)> slowdown = {};  // of each of so many computing ranks in a node; none: 1
};

struct PipelineTimes {
  double seconds = 0;          // until all ranks are done
  std::vector<double> finish;  // by rank: when its last step is done
  std::vector<double> busy;    // by rank: the seconds that it computed
};

// Takes about ranks * microbatches * stages steps. Throws Error as steps_of().
PipelineTimes simulate(const PipelineRun& run);

}  // namespace lockstep

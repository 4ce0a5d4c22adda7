// Plays a pipeline's step event by event, to find which rank computes what when, and which rank waits.
//
// The ranks do the steps of steps_of() in order, as Pipeline does. Messages travel while ranks compute, one at a time
// between two stages in each direction. Ranks of a node that compute at once may slow each other down. The function
// uses no LibTorch, and has no state.
#pragma once

#include <lockstep/layout/pipeline_schedule.hpp>

#include <functional>
#include <vector>

namespace lockstep {

struct PipelineRun {
  struct Stage {
    double forward = 0;  // seconds of computing per microbatch on its device, while no other rank computes
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
  std::vector<Stage> stages;  // there are ranks * stages_per_rank; stage s lives on rank s % ranks
  std::vector<int> node;      // each rank's node; ranks of one node slow each other down. Empty: each rank has its own
  int copies = 1;             // the number of such pipelines on the same nodes, with this one
  std::function<double(double computing)> slowdown = {};  // the slowdown by so many computing ranks in a node; none: 1
};

struct PipelineTimes {
  double seconds = 0;          // seconds until all ranks are done
  std::vector<double> finish;  // for each rank the time when its last step is done
  std::vector<double> busy;    // for each rank the seconds that it computed
};

// Takes about ranks * microbatches * stages steps. Throws Error as steps_of() does.
PipelineTimes simulate(const PipelineRun& run);

}  // namespace lockstep

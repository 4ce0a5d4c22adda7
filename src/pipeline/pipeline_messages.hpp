// Which messages a rank sends and receives while it computes its steps of a schedule, and in which order.
//
// Pure: no tensors and no backend. Each output of a stage goes to the rank of the next stage, and each gradient back.
// The order of all messages of all ranks is that in which they come to be if every step takes one unit of time. It is
// the same for all ranks and agrees with every rank's order of steps. So a rank that posts its part of the messages in
// this order never waits for itself, even where a message that is posted holds up all that are posted behind it, as on
// a stream of NCCL's.
#pragma once

#include <lockstep/layout/pipeline_schedule.hpp>

#include <vector>

namespace lockstep {

struct PipelineMessage {
  bool sent;                // by this rank; else received
  PipelineStep::Kind kind;  // of both steps: an activation or a gradient
  int peer;                 // the other side; this rank itself if it holds both stages
  int step;                 // this rank's step that makes it or that needs it
  int their_step;           // the peer's step that needs it or that makes it
};

struct PipelineMessages {
  std::vector<PipelineMessage> messages;  // this rank's, in the order of all
  // Per step of this rank: the index of the message that it needs, and of the one that it makes; -1 if there is none.
  std::vector<int> needed, made;
  // Per step: the indices of sent messages that have arrived for certain once the step has what it needs, because it
  // comes from the peer's step that needed them or from a later one. So their memory can be let go without asking.
  std::vector<std::vector<int>> arrived;
};

// `steps`: of all ranks, each in its order; forwards alone, or forwards and backwards. They must be such that all
// complete: steps_of's are.
PipelineMessages messages_of(int rank, const std::vector<std::vector<PipelineStep>>& steps, int stages);

}  // namespace lockstep

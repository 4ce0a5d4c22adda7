// Plans the messages, and their order, that a rank sends and receives during the steps of a schedule.
//
// The functions are pure: they know no tensors and no backend. Each output of a stage goes to the rank of the next
// stage, and each gradient back. If a stage computes with a parameter of an earlier one, that parameter's gradient goes
// there too. All messages of all ranks have one order: the order in which they arise if every step takes one unit of
// time. It agrees with every rank's order of steps. So a rank that posts messages in this order never waits for itself.
// This holds even if a posted message holds up all that are posted after it, as on a stream of NCCL's.
#pragma once

#include <lockstep/layout/pipeline_schedule.hpp>

#include <vector>

namespace lockstep {

// Names two stages that compute with the same parameter: the owner, and a later stage that borrows it.
struct PipelineTie {
  int owner, borrower;
};

struct PipelineMessage {
  bool sent;                // true: this rank sends the message; false: it receives
  PipelineStep::Kind kind;  // the kind of both steps: forward for an activation, backward for a gradient
  int peer;                 // the other side; this rank if it holds both stages
  int step;                 // this rank's step that makes or needs the message
  int their_step;           // the peer's step that needs or makes the message
  int tie = -1;             // the tie whose gradient it is; -1: it is no tie's gradient
};

struct PipelineMessages {
  std::vector<PipelineMessage> messages;  // this rank's messages, in the one order of all
  // Indices, by step of this rank, of the needed message and of the made message; -1: none.
  std::vector<int> needed, made;
  std::vector<std::vector<int>> ties_needed, ties_made;  // indices of ties' messages, by step
  // Indices, by step, of sent messages that have certainly arrived once the step has its own message. This comes from
  // the peer's step that needed the sent ones, or from a later step. So their memory can be freed without asking.
  std::vector<std::vector<int>> arrived;
};

// `steps` are the steps of all ranks, each rank's in its order: forwards alone, or forwards and backwards. Pass steps
// that can all complete, as those of steps_of do.
PipelineMessages messages_of(int rank, const std::vector<std::vector<PipelineStep>>& steps, int stages,
                             const std::vector<PipelineTie>& ties = {});

}  // namespace lockstep

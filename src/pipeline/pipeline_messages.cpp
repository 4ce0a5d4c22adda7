#include "pipeline_messages.hpp"

#include <lockstep/base/error.hpp>

#include <algorithm>
#include <map>
#include <optional>
#include <tuple>

namespace lockstep {
namespace {

using Kind = PipelineStep::Kind;
using Key = std::tuple<Kind, int, int>;  // a step

Key key_of(const PipelineStep& step) {
  return {step.kind, step.microbatch, step.stage};
}

struct StepPlace {
  int rank;
  int step;
  int end = 0;
};

// Returns the step whose result `step` needs from another stage.
std::optional<Key> source_of(const PipelineStep& step, int stages) {
  const bool forward = step.kind == Kind::forward;
  const int stage = step.stage + (forward ? -1 : 1);
  if (stage < 0 || stage >= stages) return std::nullopt;
  return Key{step.kind, step.microbatch, stage};
}

// Returns all steps with the time at which each ends.
std::map<Key, StepPlace> simulate(const std::vector<std::vector<PipelineStep>>& steps, int stages) {
  std::map<Key, StepPlace> done;
  std::vector<size_t> next(steps.size());
  std::vector<int> now(steps.size());
  for (bool moved = true; moved;) {
    moved = false;
    for (size_t rank = 0; rank < steps.size(); ++rank) {
      for (; next[rank] < steps[rank].size(); ++next[rank]) {
        const auto& step = steps[rank][next[rank]];
        if (const auto source = source_of(step, stages)) {
          const auto found = done.find(*source);
          if (found == done.end()) break;
          now[rank] = std::max(now[rank], found->second.end);
        }
        done[key_of(step)] = {static_cast<int>(rank), static_cast<int>(next[rank]), ++now[rank]};
        moved = true;
      }
    }
  }
  for (size_t rank = 0; rank < steps.size(); ++rank) {
    if (next[rank] == steps[rank].size()) continue;
    throw Error("pipeline: rank " + std::to_string(rank) + "'s step " + std::to_string(next[rank]) +
                " of this schedule can never be computed");
  }
  return done;
}

}  // namespace

PipelineMessages messages_of(int rank, const std::vector<std::vector<PipelineStep>>& steps, int stages,
                             const std::vector<PipelineTie>& ties) {
  const auto places = simulate(steps, stages);

  struct Timed {
    std::tuple<int, int, int> order;  // the time when it arises; then the maker's rank, then the tie
    PipelineMessage message;
  };
  std::vector<Timed> timed;
  const auto add = [&](const Key& source, const PipelineStep& step, int tie) {
    const StepPlace &from = places.at(source), &to = places.at(key_of(step));
    const std::tuple order(from.end, from.rank, tie);
    if (from.rank == rank) timed.push_back({order, {true, step.kind, to.rank, from.step, to.step, tie}});
    if (to.rank == rank) timed.push_back({order, {false, step.kind, from.rank, to.step, from.step, tie}});
  };
  for (const auto& steps_of_rank : steps) {
    for (const auto& step : steps_of_rank) {
      if (const auto source = source_of(step, stages)) add(*source, step, /*tie=*/-1);
      for (size_t tie = 0; tie < ties.size(); ++tie) {
        if (step.kind != Kind::backward || step.stage != ties[tie].owner) continue;
        // The borrower is a later stage, so its backward comes before.
        add({Kind::backward, step.microbatch, ties[tie].borrower}, step, static_cast<int>(tie));
      }
    }
  }
  std::stable_sort(timed.begin(), timed.end(), [](const auto& a, const auto& b) { return a.order < b.order; });

  PipelineMessages result;
  result.needed.assign(steps[rank].size(), -1);
  result.made.assign(steps[rank].size(), -1);
  result.arrived.resize(steps[rank].size());
  result.ties_needed.resize(steps[rank].size());
  result.ties_made.resize(steps[rank].size());
  for (const auto& [order, message] : timed) {
    const int index = static_cast<int>(result.messages.size());
    if (message.tie >= 0) {
      (message.sent ? result.ties_made : result.ties_needed)[message.step].push_back(index);
    } else {
      (message.sent ? result.made : result.needed)[message.step] = index;
    }
    result.messages.push_back(message);
  }

  std::vector<int> open;
  for (size_t step = 0; step < steps[rank].size(); ++step) {
    if (result.needed[step] >= 0) {
      const auto& answer = result.messages[result.needed[step]];
      std::erase_if(open, [&](int index) {
        const auto& sent = result.messages[index];
        const bool arrived = sent.peer == answer.peer && sent.their_step <= answer.their_step;
        if (arrived) result.arrived[step].push_back(index);
        return arrived;
      });
    }
    if (result.made[step] >= 0) open.push_back(result.made[step]);
    open.insert(open.end(), result.ties_made[step].begin(), result.ties_made[step].end());
  }
  return result;
}

}  // namespace lockstep

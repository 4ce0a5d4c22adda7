#include <lockstep/base/error.hpp>
#include <lockstep/layout/pipeline_schedule.hpp>

#include <algorithm>
#include <iterator>
#include <string>

namespace lockstep {
namespace {

using Kind = PipelineStep::Kind;
using Steps = std::vector<PipelineStep>;

constexpr std::string_view kNames[] = {"gpipe", "1f1b", "interleaved"};  // the order is that of the enumeration

void check(PipelineSchedule schedule, int ranks, int stages_per_rank, int microbatches) {
  const auto need_one = [](int count, const char* what) {
    if (count < 1) throw Error("pipeline: " + std::to_string(count) + " " + what + "; a pipeline needs at least 1");
  };
  need_one(ranks, "ranks");
  need_one(stages_per_rank, "stages per rank");
  need_one(microbatches, "microbatches");
  if (stages_per_rank > 1 && schedule != PipelineSchedule::interleaved) {
    throw Error("pipeline: the schedule " + std::string(to_string(schedule)) + " has one stage per rank, not " +
                std::to_string(stages_per_rank) + "; use interleaved, or as many stages as ranks");
  }
}

// Merges `forwards` and `backwards`: first `ahead` forwards, then a forward and a backward in turns.
Steps merge(const Steps& forwards, const Steps& backwards, size_t ahead) {
  ahead = std::min(ahead, forwards.size());
  Steps steps(forwards.begin(), forwards.begin() + static_cast<ptrdiff_t>(ahead));
  for (size_t i = 0; i < backwards.size(); ++i) {
    if (ahead + i < forwards.size()) steps.push_back(forwards[ahead + i]);
    steps.push_back(backwards[i]);
  }
  return steps;
}

// A round has as many microbatches as there are ranks. Forwards go through a rank's first stage, then through its
// second, and so on. Backwards go through the last stage first.
Steps in_rounds(Kind kind, int rank, int ranks, int stages_per_rank, int rounds) {
  Steps steps;
  for (int round = 0; round < rounds; ++round) {
    for (int i = 0; i < stages_per_rank; ++i) {
      const int place = kind == Kind::forward ? i : stages_per_rank - 1 - i;
      for (int j = 0; j < ranks; ++j) steps.push_back({kind, round * ranks + j, place * ranks + rank});
    }
  }
  return steps;
}

// Returns how many forwards a rank computes before its first pair of a forward and a backward.
int forwards_ahead(PipelineSchedule schedule, int rank, int ranks, int stages_per_rank, int microbatches) {
  switch (schedule) {
    case PipelineSchedule::gpipe:
      return microbatches;
    case PipelineSchedule::one_f_one_b:
      return ranks - rank - 1;
    case PipelineSchedule::interleaved:
      return 2 * (ranks - rank - 1) + (stages_per_rank - 1) * ranks;
  }
  return 0;
}

}  // namespace

std::string_view to_string(PipelineSchedule schedule) {
  return kNames[static_cast<size_t>(schedule)];
}

PipelineSchedule schedule_from(std::string_view name) {
  const auto* const found = std::find(std::begin(kNames), std::end(kNames), name);
  if (found == std::end(kNames)) {
    throw Error("there is no pipeline schedule \"" + std::string(name) + "\"; there are gpipe, 1f1b and interleaved");
  }
  return static_cast<PipelineSchedule>(found - std::begin(kNames));
}

std::vector<PipelineStep> steps_of(PipelineSchedule schedule, int rank, int ranks, int stages_per_rank,
                                   int microbatches) {
  check(schedule, ranks, stages_per_rank, microbatches);
  if (rank < 0 || rank >= ranks) {
    throw Error("pipeline: there is no rank " + std::to_string(rank) + " of " + std::to_string(ranks));
  }
  // With one stage per rank the order is that of rounds too. Megatron's order needs whole rounds. A microbatch's steps
  // need no other microbatch. So the order still completes without the steps of microbatches that do not exist.
  const int rounds = (microbatches + ranks - 1) / ranks;
  Steps steps = merge(in_rounds(Kind::forward, rank, ranks, stages_per_rank, rounds),
                      in_rounds(Kind::backward, rank, ranks, stages_per_rank, rounds),
                      static_cast<size_t>(forwards_ahead(schedule, rank, ranks, stages_per_rank, microbatches)));
  std::erase_if(steps, [&](const PipelineStep& step) { return step.microbatch >= microbatches; });
  return steps;
}

double ideal_idle_share(PipelineSchedule schedule, int ranks, int stages_per_rank, int microbatches) {
  check(schedule, ranks, stages_per_rank, microbatches);
  const double waits = ranks - 1;
  return waits / (static_cast<double>(stages_per_rank) * microbatches + waits);
}

}  // namespace lockstep

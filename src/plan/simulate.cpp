#include "simulate.hpp"

#include <lockstep/base/error.hpp>

#include <algorithm>
#include <limits>

namespace lockstep {
namespace {

constexpr double never = std::numeric_limits<double>::infinity();

// Names the present activity of a rank. Each of the rank's steps passes through these in turn.
enum class Doing { waiting, computing, exchanging, done };

struct SimulatedRank {
  std::vector<PipelineStep> steps;
  size_t next = 0;  // the step at hand
  Doing doing = Doing::waiting;
  double work = 0;   // the work left while computing: seconds at full speed
  double until = 0;  // the time until which the rank is exchanging
};

class Simulation {
 public:
  explicit Simulation(const PipelineRun& run)
      : run_(run),
        stages_(run.ranks * run.stages_per_rank),
        ranks_(static_cast<size_t>(run.ranks)),
        forward_input_(inputs()),
        backward_input_(inputs()),
        forward_link_(static_cast<size_t>(stages_)),
        backward_link_(static_cast<size_t>(stages_)) {
    for (int r = 0; r < run.ranks; ++r) {
      ranks_[static_cast<size_t>(r)].steps =
          steps_of(run.schedule, r, run.ranks, run.stages_per_rank, run.microbatches);
    }
    for (int m = 0; m < run.microbatches; ++m) {
      input(forward_input_, 0, m) = 0;             // the input of microbatch m is there from the start
      input(backward_input_, stages_ - 1, m) = 0;  // so is the loss's gradient: the last stage makes it
    }
    times_.finish.resize(ranks_.size());
    times_.busy.resize(ranks_.size());
  }

  PipelineTimes play() {
    for (;;) {
      begin_steps();
      const double event = next_event();
      if (event == never) break;
      advance(event);
    }
    for (const auto& rank : ranks_) {
      if (rank.doing != Doing::done) throw Error("simulation: the schedule's steps wait for each other");
    }
    times_.seconds = *std::max_element(times_.finish.begin(), times_.finish.end());
    return times_;
  }

 private:
  using Inputs = std::vector<double>;  // the times when a stage has its input for a microbatch

  Inputs inputs() const { return Inputs(static_cast<size_t>(stages_) * static_cast<size_t>(run_.microbatches), never); }
  double& input(Inputs& inputs, int stage, int microbatch) const {
    return inputs[static_cast<size_t>(stage) * static_cast<size_t>(run_.microbatches) +
                  static_cast<size_t>(microbatch)];
  }
  const PipelineRun::Stage& stage_of(const PipelineStep& step) const {
    return run_.stages[static_cast<size_t>(step.stage)];
  }
  static bool is_forward(const PipelineStep& step) { return step.kind == PipelineStep::Kind::forward; }
  double input_of(const PipelineStep& step) {
    return input(is_forward(step) ? forward_input_ : backward_input_, step.stage, step.microbatch);
  }

  // Starts every waiting rank whose next step has its input.
  void begin_steps() {
    for (auto& rank : ranks_) {
      if (rank.doing != Doing::waiting) continue;
      if (rank.next == rank.steps.size()) {
        rank.doing = Doing::done;
        times_.finish[static_cast<size_t>(&rank - ranks_.data())] = now_;
      } else if (const auto& step = rank.steps[rank.next]; input_of(step) <= now_) {
        rank.doing = Doing::computing;
        rank.work = is_forward(step) ? stage_of(step).forward : stage_of(step).backward;
      }
    }
  }

  // Returns the factor by which rank `r` computes longer than alone.
  double slowdown_of(size_t r) const {
    if (!run_.slowdown) return 1;
    double computing = 0;
    for (size_t other = 0; other < ranks_.size(); ++other) {
      const bool same_node = run_.node.empty() ? other == r : run_.node[other] == run_.node[r];
      if (same_node && ranks_[other].doing == Doing::computing) ++computing;
    }
    return run_.slowdown(computing * run_.copies);
  }

  double next_event() {
    double event = never;
    for (size_t r = 0; r < ranks_.size(); ++r) {
      const auto& rank = ranks_[r];
      if (rank.doing == Doing::computing) event = std::min(event, now_ + rank.work * slowdown_of(r));
      if (rank.doing == Doing::exchanging) event = std::min(event, rank.until);
      if (rank.doing == Doing::waiting) event = std::min(event, input_of(rank.steps[rank.next]));
    }
    return event;
  }

  // Moves the clock to `event`, and ends what ends there.
  void advance(double event) {
    std::vector<double> slowdown(ranks_.size(), 1);  // the slowdown before any rank stops
    for (size_t r = 0; r < ranks_.size(); ++r) {
      if (ranks_[r].doing == Doing::computing) slowdown[r] = slowdown_of(r);
    }
    const double passed = event - now_;
    for (size_t r = 0; r < ranks_.size(); ++r) {
      auto& rank = ranks_[r];
      if (rank.doing == Doing::computing) {
        times_.busy[r] += passed;
        // If ranks end at the same moment, rounding could leave one a rest so small that the clock would stand still.
        const bool ends = now_ + rank.work * slowdown[r] <= event * (1 + 1e-12);
        rank.work -= passed / slowdown[r];
        if (!ends) continue;
        const auto& step = rank.steps[rank.next];
        rank.doing = Doing::exchanging;
        rank.until = event + (is_forward(step) ? stage_of(step).forward_messages : stage_of(step).backward_messages);
      }
      if (rank.doing == Doing::exchanging && rank.until <= event) finish(rank, event);
    }
    now_ = event;
  }

  void finish(SimulatedRank& rank, double time) {
    const auto& step = rank.steps[rank.next++];
    rank.doing = Doing::waiting;
    const auto travel = [&](std::vector<double>& link, double seconds) {
      double& free = link[static_cast<size_t>(step.stage)];
      return free = std::max(free, time) + seconds;
    };
    if (is_forward(step) && step.stage + 1 < stages_) {
      input(forward_input_, step.stage + 1, step.microbatch) = travel(forward_link_, stage_of(step).send_forward);
    } else if (!is_forward(step) && step.stage > 0) {
      input(backward_input_, step.stage - 1, step.microbatch) = travel(backward_link_, stage_of(step).send_backward);
    }
  }

  const PipelineRun& run_;
  const int stages_;
  std::vector<SimulatedRank> ranks_;
  Inputs forward_input_, backward_input_;
  std::vector<double> forward_link_, backward_link_;  // the times when the next message of stage s can set out
  PipelineTimes times_;
  double now_ = 0;
};

}  // namespace

PipelineTimes simulate(const PipelineRun& run) {
  return Simulation(run).play();
}

}  // namespace lockstep

#include <c10/core/GradMode.h>
#include <lockstep/base/error.hpp>
#include <lockstep/lab/local_sgd.hpp>

#include "base/classic.hpp"
#include "data_parallel/flat_view.hpp"
#include "data_parallel/gradient_hook.hpp"
#include "data_parallel/tensor_hash.hpp"
#include "ranks/gather.hpp"
#include "ranks/trained_parameters.hpp"

#include <cmath>
#include <map>
#include <string>

namespace lockstep {
namespace {

void check_local_sgd(const LocalSgdOptions& options, const Rank& rank) {
  const auto refuse = [&](const char* what, const auto& value, const char* rule) {
    throw Error(classic_text(rank.name(), ": LocalSgd: ", what, " is ", value, "; it must be ", rule));
  };
  if (options.sync_every < 1) refuse("sync_every", options.sync_every, "at least 1");
  if (!(options.outer_lr > 0) || std::isinf(options.outer_lr)) refuse("outer_lr", options.outer_lr, "above 0");
  if (!(options.outer_momentum >= 0 && options.outer_momentum < 1)) {
    refuse("outer_momentum", options.outer_momentum, "from 0 to below 1");
  }
}

NamedParameters numbered(const std::vector<at::Tensor>& parameters) {
  NamedParameters named;
  for (size_t i = 0; i < parameters.size(); ++i) named.emplace_back("parameter " + std::to_string(i), parameters[i]);
  return named;
}

// An outer optimizer moves each rank from its own start for ever.
[[noreturn]] void refuse_unequal_starts(const Rank& rank) {
  throw Error(
      rank.name() +
          ": LocalSgd: the ranks' parameters differ, and an outer optimizer would keep them apart for ever. Make "
          "the DataParallel before it, and load weights on all ranks",
      {Error::difference});
}

bool are_equal(const at::Tensor& rows) {
  return rows.eq(rows[0]).all().item<bool>();
}

}  // namespace

// Keeps the parameters' values at the begin of a round, from which an outer optimizer moves them.
//
// A round begins with the first gradient that autograd adds up after the round before. If parameters have changed since
// that round, as when the user loads weights, the values of that moment count. Use it from the rank's thread;
// autograd's thread uses it while the rank's waits. Cost: it holds the parameters once more.
class RoundStart {
 public:
  // Give it groups of one type each, of parameters that need gradients.
  explicit RoundStart(std::vector<std::vector<at::Tensor>> groups) : groups_(std::move(groups)) {
    for (const auto& group : groups_) {
      values_.push_back(flat_copy(group));
      for (const auto& parameter : group)
        hooks_.push_back(std::make_unique<GradientHook>(parameter, [this] { on_gradient(); }));
    }
    end_round();
  }
  RoundStart& operator=(RoundStart&&) = delete;  // hooks point to it

  at::Tensor& values(size_t group) { return values_[group]; }  // flat, see flat_copy()

  // The values are in the parameters now. The next gradient begins a round.
  void end_round() {
    noted_.clear();
    for (const auto& group : groups_) {
      for (const auto& parameter : group) noted_.emplace_back(parameter.const_data_ptr(), parameter._version());
    }
    has_begun_ = is_new_ = false;
  }

  // Throws Error, on all ranks, if the ranks' values differ.
  void check_equal(Rank& rank) const {
    std::vector<int64_t> hashes;
    for (const auto& values : values_) hashes.push_back(tensor_hash(values));
    if (!are_equal(of_all_ranks(rank, hashes))) refuse_unequal_starts(rank);
  }

  // Throws Error if some rank has loaded other values, and not all have loaded the same.
  void agree(Rank& rank) {
    const auto mine = marks();
    const at::Tensor all = of_all_ranks(rank, mine), begun = all.select(1, 0);
    if (!begun.eq(kWithOthers).any().item<bool>()) return;
    const bool any_as_left = begun.eq(kAsLeft).any().item<bool>();
    if (any_as_left || !are_equal(all.narrow(1, 1, all.size(1) - 1))) refuse_unequal_starts(rank);
    if (mine[0] == kNotKnown) take_present_values();
  }

 private:
  // Says whether this round began with the values that the one before left, or with others. A rank without samples in
  // the round cannot know whether its values were loaded or moved since.
  enum Begun : int64_t { kAsLeft, kWithOthers, kNotKnown };

  // Gives Begun, then hashes of the values; zeros if they are as left. Looks at the values only if the round before
  // left others; then the host waits for a GPU.
  std::vector<int64_t> marks() const {
    const c10::AutoGradMode no_grad(false);
    const Begun begun = !has_begun_ && is_touched() ? kNotKnown : is_new_ ? kWithOthers : kAsLeft;
    std::vector<int64_t> marks{begun};
    for (size_t i = 0; i < groups_.size(); ++i) {
      marks.push_back(begun == kAsLeft ? 0 : tensor_hash(begun == kNotKnown ? flat_copy(groups_[i]) : values_[i]));
    }
    return marks;
  }

  // Touched parameters may have the same values all the same, as after an evaluation with others on one rank alone.
  void on_gradient() {
    if (!std::exchange(has_begun_, true) && is_touched()) take_present_values();
  }

  // Comparing values would make the host wait for a GPU in each round.
  bool is_touched() const {
    size_t i = 0;
    for (const auto& group : groups_) {
      for (const auto& parameter : group) {
        const auto& [memory, version] = noted_[i++];
        if (parameter.const_data_ptr() != memory || parameter._version() != version) return true;
      }
    }
    return false;
  }

  void take_present_values() {
    const c10::AutoGradMode no_grad(false);
    for (size_t i = 0; i < groups_.size(); ++i) {
      const at::Tensor now = flat_copy(groups_[i]);
      if (same_values(now, values_[i])) continue;
      values_[i] = now;
      is_new_ = true;
    }
  }

  const std::vector<std::vector<at::Tensor>> groups_;
  std::vector<at::Tensor> values_;
  std::vector<std::pair<const void*, uint32_t>> noted_;  // where each parameter lay, and its version
  bool has_begun_ = false;
  bool is_new_ = false;  // the round began with other values than the one before left
  std::vector<std::unique_ptr<GradientHook>> hooks_;
};

LocalSgd::LocalSgd(const std::vector<at::Tensor>& parameters, Rank& rank, const LocalSgdOptions& options)
    : rank_(rank), options_(options), parameters_(std::make_shared<const TrainedParameters>(numbered(parameters))) {
  check_local_sgd(options_, rank);
  std::map<at::ScalarType, size_t> group_of;
  for (const auto& [name, parameter] : parameters_->all()) {
    const auto [entry, is_new] = group_of.try_emplace(parameter.scalar_type(), groups_.size());
    if (is_new) groups_.emplace_back();
    auto& group = groups_[entry->second].parameters;
    places_.emplace_back(entry->second, group.size());
    group.push_back(parameter);
  }
  if (groups_.empty()) throw Error(rank.name() + ": LocalSgd: there is no parameter that needs a gradient");
  if (!outer()) return;
  std::vector<std::vector<at::Tensor>> parameters_of_groups;
  for (const auto& group : groups_) parameters_of_groups.push_back(group.parameters);
  start_ = std::make_shared<RoundStart>(std::move(parameters_of_groups));
  start_->check_equal(rank_);
}

bool LocalSgd::step() {
  ++steps_;
  return steps_ == options_.sync_every && synchronize();
}

bool LocalSgd::synchronize() {
  if (steps_ == 0) return false;
  parameters_->check(rank_, "LocalSgd", "would move it on each rank alone");
  if (start_) start_->agree(rank_);
  const c10::NoGradGuard no_grad;
  for (size_t i = 0; i < groups_.size(); ++i) {
    const auto& parameters = groups_[i].parameters;
    at::Tensor values = flat_copy(parameters);
    rank_.allreduce(values, c10d::ReduceOp::AVG);
    if (start_) values = moved(i, values);
    const auto parts = parts_like(parameters, values);
    for (size_t k = 0; k < parts.size(); ++k) parameters[k].copy_(parts[k]);
  }
  if (start_) start_->end_round();
  steps_ = 0;
  return true;
}

at::Tensor LocalSgd::moved(size_t group, const at::Tensor& mean) {
  at::Tensor gradient = start_->values(group) - mean;
  if (options_.outer_momentum != 0) {
    at::Tensor& momentum = groups_[group].momentum;
    if (momentum.defined()) {
      momentum.mul_(options_.outer_momentum).add_(gradient);
    } else {
      momentum = gradient.clone();
    }
    gradient.add_(momentum, options_.outer_momentum);
  }
  return start_->values(group).sub_(gradient, options_.outer_lr);
}

std::vector<at::Tensor> LocalSgd::momentum() const {
  std::vector<std::vector<at::Tensor>> of_groups;
  for (const auto& group : groups_) {
    if (!group.momentum.defined()) return {};
    of_groups.push_back(parts_like(group.parameters, group.momentum));
  }
  std::vector<at::Tensor> momentum;
  for (const auto& [group, place] : places_) momentum.push_back(of_groups[group][place]);
  return momentum;
}

void LocalSgd::set_momentum(const std::vector<at::Tensor>& momentum) {
  if (momentum.size() != places_.size()) {
    throw Error(rank_.name() + ": LocalSgd: a momentum of " + std::to_string(momentum.size()) + " tensors for " +
                std::to_string(places_.size()) + " parameters");
  }
  std::vector<std::vector<at::Tensor>> of_groups(groups_.size());
  for (size_t i = 0; i < momentum.size(); ++i) {
    const auto& [group, place] = places_[i];
    const at::Tensor& parameter = groups_[group].parameters[place];
    if (momentum[i].sizes() != parameter.sizes()) {
      throw Error(classic_text(rank_.name(), ": LocalSgd: momentum ", i, " has the shape ", momentum[i].sizes(),
                               ", and its parameter ", parameter.sizes()));
    }
    of_groups[group].push_back(momentum[i].to(parameter.options()));
  }
  for (size_t i = 0; i < groups_.size(); ++i) groups_[i].momentum = flat_copy(of_groups[i]);
}

}  // namespace lockstep

#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <lockstep/error.hpp>
#include <lockstep/sharded_optimizer.hpp>

#include "flat_view.hpp"

#include <map>
#include <set>
#include <utility>

namespace lockstep {

ShardedOptimizer::ShardedOptimizer(const std::vector<at::Tensor>& parameters, Rank& rank, const Factory& make)
    : rank_(rank) {
  std::map<at::ScalarType, std::vector<at::Tensor>> by_type;
  std::set<const c10::TensorImpl*> seen;
  for (const auto& parameter : parameters) {
    if (!parameter.requires_grad() || !seen.insert(parameter.unsafeGetTensorImpl()).second) continue;
    if (parameter.device() != rank.device()) {
      throw Error(rank.name() + ": ShardedOptimizer: a parameter is on " + parameter.device().str() +
                  "; move the module to the rank's device first, as DataParallel does");
    }
    by_type[parameter.scalar_type()].push_back(parameter);
  }
  if (by_type.empty()) throw Error(rank.name() + ": ShardedOptimizer: there is no parameter that needs a gradient");
  std::vector<at::Tensor> slices;
  for (const auto& [type, of_type] : by_type) {
    flats_.push_back(flatten(of_type));
    slices.push_back(flats_.back().slice);
  }
  optimizer_ = make(slices);
  if (!optimizer_) throw Error(rank.name() + ": ShardedOptimizer: the factory made no optimizer");
}

ShardedOptimizer::Flat ShardedOptimizer::flatten(const std::vector<at::Tensor>& parameters) const {
  const c10::NoGradGuard no_grad;
  const int64_t ranks = rank_.world_size();
  int64_t size = 0;
  for (const auto& parameter : parameters) size += parameter.numel();
  const int64_t of_each = (size + ranks - 1) / ranks;

  Flat flat{parameters, {}, at::zeros({of_each * ranks}, parameters[0].options().requires_grad(false)), {}, {}};
  flat.gradients = at::zeros_like(flat.values);
  int64_t offset = 0;
  for (auto& parameter : flat.parameters) {
    const at::Tensor value = view_in_flat(parameter, flat.values, offset);
    value.copy_(parameter);
    flat.views.push_back(view_in_flat(parameter, flat.gradients, offset));
    parameter.set_data(value);
    offset += parameter.numel();
  }
  collect_gradients(flat);
  flat.slice = flat.values.narrow(0, of_each * rank_.index(), of_each).variable_data();
  flat.slice.requires_grad_();
  flat.slice.mutable_grad() = at::zeros_like(flat.slice);
  return flat;
}

// Backward adds to gradients that are there already, so mostly they are where they should be.
void ShardedOptimizer::collect_gradients(Flat& flat) const {
  for (size_t i = 0; i < flat.parameters.size(); ++i) {
    auto& gradient = flat.parameters[i].mutable_grad();
    const at::Tensor& view = flat.views[i];
    if (!gradient.defined()) {
      view.zero_();
    } else if (gradient.layout() != at::kStrided) {
      throw Error(rank_.name() + ": ShardedOptimizer: a gradient is sparse; build its Embedding with sparse(false)");
    } else if (!same_memory(gradient, view)) {
      view.copy_(gradient);
    }
    gradient = view;
  }
}

void ShardedOptimizer::zero_grad() {
  for (auto& flat : flats_) {
    for (auto& parameter : flat.parameters) parameter.mutable_grad().reset();
    const c10::NoGradGuard no_grad;
    collect_gradients(flat);
  }
}

void ShardedOptimizer::step() {
  const c10::NoGradGuard no_grad;
  const int64_t ranks = rank_.world_size();
  for (auto& flat : flats_) {
    collect_gradients(flat);
    std::vector<std::vector<at::Tensor>> shares{flat.gradients.chunk(ranks)};
    std::vector<at::Tensor> mean{flat.slice.mutable_grad()};
    c10d::ReduceScatterOptions options;
    options.reduceOp = c10d::ReduceOp::AVG;
    rank_.backend().reduce_scatter(mean, shares, options)->wait();
  }
  optimizer_->step();
  for (auto& flat : flats_) {
    std::vector<std::vector<at::Tensor>> all{flat.values.chunk(ranks)};
    std::vector<at::Tensor> mine{flat.slice.detach()};
    rank_.backend().allgather(all, mine, c10d::AllgatherOptions{})->wait();
  }
}

}  // namespace lockstep

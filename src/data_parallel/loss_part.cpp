#include "loss_part.hpp"

#include <ATen/autocast_mode.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <lockstep/base/error.hpp>
#include <lockstep/data_parallel/sync_batch_norm.hpp>

#include "comm/purpose.hpp"
#include "data/part_weight.hpp"
#include "nn/factors_scope.hpp"
#include "nn/weighed_backward.hpp"
#include "replica.hpp"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

namespace lockstep {
namespace {

double weight_of(double local_size, double global_size, const Replica& replica) {
  return part_weight(local_size, global_size, replica.rank().world_size(), "DataParallel");
}

// Weights of classes are no numbers of samples: their sums make up no batch.
PartSizes sizes_of(double local_size, double global_size) {
  if (std::floor(local_size) != local_size || std::floor(global_size) != global_size) return {};
  return {.local = static_cast<int64_t>(local_size), .global = static_cast<int64_t>(global_size)};
}

PartSizes sizes_of(const Batch& batch) {
  return {.local = batch.size(), .global = batch.global_size, .mark = batch.mark, .by_grains = batch.grain > 0};
}

// Tells whether an empty part must go through the layers too, because one of them exchanges in forward.
bool forwards_empty_parts(const Replica& replica) {
  return replica.divides_parameters() || has_sync_batchnorm(replica.module());
}

// Returns if nothing is to be trained: then no loss has a graph.
void refuse_loss_without_graph(const Replica& replica) {
  for (const auto& parameter : replica.module().parameters()) {
    if (!parameter.requires_grad()) continue;
    throw Error(
        replica.rank().name() +
        ": DataParallel: backward() of a loss that no parameter leads to: it was computed under NoGradGuard "
        "or InferenceMode, or from detached tensors or item(). Compute it from the net's output, with gradients on");
  }
}

at::Tensor one_number(const at::Tensor& mean) {
  if (!mean.defined() || mean.numel() != 1) {
    throw Error(
        "DataParallel: the loss must be one number, the mean over the part's samples; use the criterion's mean "
        "reduction");
  }
  return mean.dim() > 0 ? mean.reshape({}) : mean;
}

}  // namespace

Loss loss_of(const std::shared_ptr<Replica>& replica, const Batch& batch, const MeanOf& mean_of) {
  // Without grains nobody needs the batch or the function after forward(), so references are enough.
  const bool keeps = batch.grain > 0;
  auto part = std::make_shared<Loss::Part>(replica, batch, keeps ? mean_of : MeanOf(std::cref(mean_of)), keeps);
  part->forward();
  return Loss(std::move(part));
}

Loss late_loss_of(const std::shared_ptr<Replica>& replica, const Batch& batch, const MeanOf& mean_of) {
  return Loss(std::make_shared<Loss::Part>(replica, batch, mean_of, /*keeps_batch=*/true));
}

Loss interleaved_loss_of(const std::shared_ptr<Replica>& replica, const Batch& batch,
                         std::function<at::Tensor()> compute) {
  return Loss(std::make_shared<Loss::Part>(replica, batch, std::move(compute)));
}

Loss Replicas::loss_of(const Batch& batch, const MeanOf& mean_of) {
  return lockstep::loss_of(replica_, batch, mean_of);
}

Loss Replicas::loss_of(const Batch& batch, const Criterion& criterion, const MeanOf& mean_of) {
  if (!criterion.of()) return loss_of(batch, mean_of);
  return loss_of(replica_->counts().counted(batch, criterion.of()), mean_of);
}

Loss Replicas::mean(at::Tensor local_mean, double local_size, double global_size) {
  return Loss(std::make_shared<Loss::Part>(replica_, std::move(local_mean), local_size, global_size));
}

double Replicas::weight_of(int64_t local_size, int64_t global_size) const {
  return lockstep::weight_of(static_cast<double>(local_size), static_cast<double>(global_size), *replica_);
}

// ---- The terms.

Loss::Part::Part(std::shared_ptr<Replica> replica, const Batch& batch, MeanOf mean_of, bool keeps_batch)
    : replica_(std::move(replica)),
      sizes_(sizes_of(batch)),
      kept_batch_(keeps_batch ? std::optional(sizes_.by_grains ? replica_->grains().checked(batch) : batch)
                              : std::nullopt),
      batch_(kept_batch_ ? &*kept_batch_ : &batch),
      mean_of_(std::move(mean_of)),
      place_(replica_->places().of(*batch_)) {
  if (!sizes_.by_grains) {
    weight_ = weight_of(size_, static_cast<double>(sizes_.global), *replica_);
    terms_.push_back({.size = sizes_.local});
    return;
  }
  runs_ = batch_->runs;
  for (int64_t number = batch_->own_grains().begin; number < batch_->own_grains().end; ++number)
    terms_.push_back({.number = number, .size = std::min(batch.grain, batch.global_size - number * batch.grain)});
  const auto stand_ins = static_cast<size_t>(replica_->grains().stand_ins_of(*batch_));
  terms_.resize(terms_.size() + stand_ins, {.number = kStandIn});
}

Loss::Part::Part(std::shared_ptr<Replica> replica, const Batch& batch, std::function<at::Tensor()> compute)
    : replica_(std::move(replica)),
      sizes_(batch.x.defined() ? sizes_of(batch) : PartSizes()),  // a pipeline refuses a batch without x
      is_interleaved_(true),
      compute_(std::move(compute)) {}

Loss::Part::Part(std::shared_ptr<Replica> replica, at::Tensor mean, double local_size, double global_size)
    : replica_(std::move(replica)),
      sizes_(sizes_of(local_size, global_size)),
      size_(local_size),
      weight_(weight_of(local_size, global_size, *replica_)) {
  if (local_size == 0 && !(mean.defined() && forwards_empty_parts(*replica_)))
    mean = at::zeros({}, replica_->rank().device());
  terms_.push_back({.size = sizes_.global > 0 ? sizes_.local : int64_t{local_size > 0}, .mean = one_number(mean)});
  sum_ = terms_[0].mean;
}

at::Tensor Loss::Part::mean_of(const Term& term) const {
  if (sizes_.by_grains) {
    return is_stand_in(term) ? replica_->grains().mean_of_stand_in(*batch_, place_, mean_of_)
                             : replica_->grains().mean_of_grain(batch_->of_grain(term.number), place_, mean_of_);
  }
  if (term.size == 0 && !forwards_empty_parts(*replica_)) return at::zeros({}, replica_->rank().device());
  const SampleScope scope(place_);
  return mean_of_(*batch_);
}

// By grains, the part's mean adds up in float64.
void Loss::Part::compute(Term& term) {
  term.mean = one_number(mean_of(term));
  if (!sizes_.by_grains) return void(sum_ = term.mean);
  term.value = term.mean.detach();
  if (!is_stand_in(term)) sum_.add_(term.value, static_cast<double>(term.size));
}

void Loss::Part::begin(const MeanOf& mean_of) {
  if (!sizes_.by_grains) return;
  sum_ = at::zeros({}, at::TensorOptions(replica_->rank().device()).dtype(at::kDouble));
  if (GrainCheck* const check = replica_->grains().check()) check->begin(*batch_, place_, mean_of);
}

void Loss::Part::forward() {
  begin(mean_of_);
  for (auto& term : terms_) compute(term);
  kept_batch_.reset();
  batch_ = nullptr;
  mean_of_ = nullptr;
}

// ---- The loop.

void Loss::Part::backward() {
  if (is_done_) throw Error(replica_->rank().name() + ": Loss: backward() was called before; make a new loss()");
  if (is_interleaved_) return backward_interleaved();
  const bool is_late = mean_of_ != nullptr;
  for (const auto& term : terms_) {
    if (!is_late) check(term);
  }
  const auto compute_all = [this] { backward_of_all(); };
  replica_->backwards().run(compute_all, sizes_, runs_);
  if (!is_late) return;  // LibTorch refuses a graph's second backward
  is_done_ = true;
  kept_batch_.reset();
  batch_ = nullptr;
  mean_of_ = nullptr;
}

void Loss::Part::backward_of_all() {
  const bool computes_means = mean_of_ != nullptr;
  // The replica's check must not keep the replica alive, which mean_of_ may hold.
  if (computes_means) begin([this](const Batch& grain) { return mean_of_(grain); });
  int64_t stand_ins = std::count_if(terms_.begin(), terms_.end(), is_stand_in);
  for (Term& term : terms_) {
    if (is_stand_in(term)) --stand_ins;
    if (computes_means) {
      compute(term);
      check(term);
    }
    backward_of(term, stand_ins);
    if (computes_means) term.mean.reset();
  }
}

void Loss::Part::backward_interleaved() {
  is_done_ = true;
  sum_ = std::exchange(compute_, nullptr)();
}

void Loss::Part::check(const Term& term) const {
  if (term.size == 0) return;
  if (!term.mean.requires_grad()) refuse_loss_without_graph(*replica_);
  if (!replica_->averaging()) return;
  replica_->warnings().see_loss(term.mean, term.size, sizes_.global > 0 ? sizes_.global : term.size);
}

// Leaves gradients as they are if the mean has no graph, as for most empty parts. A stand-in has no samples, so its
// gradients are zero, and dropped.
void Loss::Part::backward_of(const Term& term, int64_t stand_ins) const {
  if (!term.mean.requires_grad()) return;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);  // forward chose the types
  if (scale_ != 1 && term.mean.element_size() < 4) {
    throw Error(replica_->rank().name() +
                ": LossScaler: the loss has 16 bits, which hold no scaled gradient of it. Compute it in float32: "
                "criterion(y_hat.to(torch::kFloat), y)");
  }
  const double weight = scale_ * (sizes_.by_grains ? static_cast<double>(term.size) : weight_);
  const WeighedBackward weighed(term.mean, weight, replica_->module());
  // A unit of divided parameters is reduced as soon as all gradients are there, and waits for no factors. A single
  // rank's gradients stay where backward leaves them, so the graph need not be walked for who reads which weight.
  std::optional<FactorsScope> scope;
  if (replica_->averaging() && (sizes_.by_grains || replica_->rank().world_size() > 1)) {
    scope.emplace(term.mean, [&](const auto& parameter, const auto& factors) {
      return !replica_->divides_parameters() && !weighed.weighs_gradients() &&
             replica_->averaging()->take_factors(parameter, factors);
    });
  }
  const auto backward = [&] { term.mean.backward(weighed.seed()); };
  sizes_.by_grains ? replica_->grains().backward(term.number, backward, stand_ins) : backward();
}

// ---- A scale.

// Before the average divides by the number of ranks, each sample weighs that many times as much as on one device, and
// float16 would overflow earlier. A grain's samples weigh the same on any number of ranks.
double Loss::Part::scale_divisor(const Replica& replica, bool by_grains) {
  return by_grains ? 1 : replica.rank().world_size();
}

void Loss::Part::scale(double factor) {
  if (is_interleaved_ || replica_->grains().check()) {
    throw Error(replica_->rank().name() + ": LossScaler: " +
                (is_interleaved_ ? "a pipeline's losses cannot be scaled. Take bfloat16, or a net without a pipeline"
                                 : "a grain_check computes gradients again without a scale. Leave one of them out"));
  }
  scale_ = factor / scale_divisor(*replica_, sizes_.by_grains);
}

// ---- The value.

void Loss::Part::check_that_it_is_computed() const {
  if (sum_.defined()) return;
  throw Error(replica_->rank().name() +
              ": Loss: there is no value yet. In a pipeline, and with a grain in a SplitModel, backward() computes "
              "forward too: call it before value(), item() and global_item(). For a loss without gradients, take "
              "net.forward(x)");
}

at::Tensor Loss::Part::value() const {
  check_that_it_is_computed();
  return sizes_.by_grains && !is_interleaved_ ? sum_ / std::max<double>(1, static_cast<double>(sizes_.local))
                                              : sum_.detach();
}

// Gives each grain a row of a table, which one rank fills, so that the ranks' sum is exact. Rows are added in the order
// of the grains.
double Loss::Part::global_value() const {
  check_that_it_is_computed();
  Rank& rank = replica_->rank();
  if (!sizes_.by_grains) return rank.mean(value().item<double>(), size_);
  if (is_interleaved_) {
    throw Error(rank.name() +
                ": Loss: global_item() of a pipeline with a grain would not have the same bits on any number of ranks; "
                "take item() and Rank::mean(), or no pipeline");
  }
  const c10::NoGradGuard no_grad;
  const std::string use = "mean()";
  const comm::Purpose purpose(use);
  const at::Tensor table = at::zeros({runs_.back(), 2}, at::TensorOptions(rank.device()).dtype(at::kDouble));
  for (const auto& term : terms_) {
    if (is_stand_in(term)) continue;
    const auto size = static_cast<double>(term.size);
    table[term.number][0].copy_(term.value.to(at::kDouble) * size);
    table[term.number][1].fill_(size);
  }
  rank.allreduce(table);
  const at::Tensor rows = table.cpu();
  const double* const row = rows.const_data_ptr<double>();
  double sum = 0, samples = 0;
  for (int64_t number = 0; number < rows.size(0); ++number) {
    sum += row[2 * number];
    samples += row[2 * number + 1];
  }
  return sum / samples;
}

void Loss::backward() {
  part_->backward();
}

at::Tensor Loss::value() const {
  return part_->value();
}

double Loss::global_item() const {
  return part_->global_value();
}

}  // namespace lockstep

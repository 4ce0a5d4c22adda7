#include <ATen/ops/batch_norm_update_stats.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/native_batch_norm.h>
#include <ATen/ops/native_batch_norm_backward.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/functional/batchnorm.h>
#include <lockstep/base/error.hpp>
#include <lockstep/data_parallel/sync_batch_norm.hpp>

#include <optional>
#include <ostream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/classic.hpp"

namespace lockstep {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Holds statistics over the values of all ranks, per channel.
struct ChannelStatistics {
  Tensor mean;      // [channels]; float64 if x is, else float32
  Tensor variance;  // likewise; divided by the count
  Tensor count;     // the number of values in each channel: float64, on the device
};

at::ScalarType type_of_statistics(const Tensor& x) {
  return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// Gives float64 [2 channels + 1]: the means and the variances of this rank's values, and the number of values in each
// channel.
Tensor own_statistics(const Tensor& x) {
  const int64_t channels = x.size(1);
  const auto type = at::TensorOptions(x.device()).dtype(at::kDouble);
  if (x.numel() == 0) return at::zeros({2 * channels + 1}, type);
  const auto [mean, variance] = at::batch_norm_update_stats(x.to(type_of_statistics(x)), {}, {}, /*momentum=*/0);
  const Tensor count = at::full({1}, static_cast<double>(x.numel()) / static_cast<double>(channels), type);
  return at::cat({mean.to(at::kDouble), variance.to(at::kDouble), count});
}

// Merges the ranks' statistics as Chan et al. do (1979, "Updating formulae and a pairwise algorithm for computing
// sample variances"). Sums of squares are less exact where the mean is large. It computes in float64, in the order of
// the ranks, so all ranks get equal bits.
ChannelStatistics statistics_of_all(const Tensor& x, Rank& rank) {
  const int64_t channels = x.size(1);
  const Tensor table = rank.allgather(own_statistics(x));

  const Tensor counts = table.narrow(1, 2 * channels, 1);
  const Tensor means = table.narrow(1, 0, channels), variances = table.narrow(1, channels, channels);
  const Tensor count = counts.sum();
  const Tensor mean = (counts * means).sum(0) / count;
  const Tensor variance = (counts * (variances + (means - mean).square())).sum(0) / count;
  if (x.is_cpu() && count.item<double>() < 2) {
    throw Error(rank.name() + ": SyncBatchNorm: the batch of all ranks has " + std::to_string(count.item<int64_t>()) +
                " values per channel, and statistics need at least 2. If it is an epoch's last batch, leave it out: " +
                "BatchOptions::drop_last, in a run `drop_last`. Otherwise train on larger batches, or call eval()");
  }
  const auto type = type_of_statistics(x);
  return {mean.to(type), variance.to(type), count};
}

// Computes (x - mean) / sqrt(variance + eps) * weight + bias, in one pass over x.
Tensor normalised(const Tensor& x, const Tensor& weight, const Tensor& bias, const ChannelStatistics& statistics,
                  double eps) {
  return std::get<0>(at::native_batch_norm(x, weight, bias, statistics.mean, statistics.variance, /*training=*/false,
                                           /*momentum=*/0, eps));
}

// Gives the sums over this rank's values of dy * xhat and of dy, per channel: also the gradients of weight and bias.
std::pair<Tensor, Tensor> own_sums(const Tensor& dy, const Tensor& x, const ChannelStatistics& statistics, double eps) {
  if (x.numel() == 0) return {at::zeros_like(statistics.mean), at::zeros_like(statistics.mean)};
  // Unless it computes x's gradient too, CUDA's kernel reads save_mean and save_invstd also in eval mode, and makes the
  // gradients like the weight, whose values do not matter.
  const Tensor invstd = (statistics.variance + eps).rsqrt(), weight = at::ones_like(statistics.mean);
  const auto gradients =
      at::native_batch_norm_backward(dy, x, weight, statistics.mean, statistics.variance, statistics.mean, invstd,
                                     /*train=*/false, eps, {false, true, true});
  return {std::get<1>(gradients), std::get<2>(gradients)};
}

struct RankForBackward : torch::CustomClassHolder {
  explicit RankForBackward(const Rank& rank) : rank(rank) {}
  Rank rank;
};

// Holds the inputs of Normalise that have no gradients.
struct Normalisation {
  ChannelStatistics statistics;
  double eps;
  Rank rank;
};

// The statistics depend on x, and the gradient of x takes this into account.
struct Normalise : torch::autograd::Function<Normalise> {
  // Autograd takes optional inputs, but no undefined ones.
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const std::optional<Tensor>& weight,
                        const std::optional<Tensor>& bias, const Normalisation& how) {
    ctx->save_for_backward(
        {x, weight.value_or(Tensor()), how.statistics.mean, how.statistics.variance, how.statistics.count});
    ctx->saved_data["eps"] = how.eps;
    ctx->saved_data["rank"] = c10::IValue::make_capsule(c10::make_intrusive<RankForBackward>(how.rank));
    if (x.numel() == 0) return x.clone();
    const auto type = type_of_statistics(x);
    const auto as_statistics = [&](const auto& tensor) { return tensor ? tensor->to(type) : Tensor(); };
    return normalised(x, as_statistics(weight), as_statistics(bias), how.statistics, how.eps);
  }

  // Computes dx = weight / sqrt(variance + eps) * (dy - mean(dy) - xhat * mean(dy * xhat)), with means over all ranks'
  // values (Ioffe and Szegedy 2015, section 3).
  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    if (at::GradMode::is_enabled()) {
      throw Error("SyncBatchNorm can be differentiated once; call backward without create_graph");
    }
    const auto saved = ctx->get_saved_variables();
    const Tensor& weight = saved[1];
    const ChannelStatistics statistics{saved[2], saved[3], saved[4]};
    const double eps = ctx->saved_data.at("eps").toDouble();
    const auto type = statistics.mean.scalar_type();
    const Tensor x = saved[0].to(type), dy = gradients[0].to(type);

    const auto [of_weight, of_bias] = own_sums(dy, x, statistics, eps);
    const Tensor sums = at::cat({of_weight, of_bias}).to(at::kDouble);
    const auto kept = c10::static_intrusive_pointer_cast<RankForBackward>(ctx->saved_data.at("rank").toCapsule());
    kept->rank.allreduce(sums);

    Tensor dx = at::zeros_like(x);
    if (x.numel() > 0) {
      const Tensor deviation = (statistics.variance + eps).sqrt();
      const Tensor scale = weight.defined() ? weight.to(type) / deviation : deviation.reciprocal();
      const auto means = (sums / -statistics.count).to(type).chunk(2);
      dx = normalised(x, means[0] * scale, means[1] * scale, statistics, eps);
      std::vector<int64_t> per_channel(x.dim(), 1);
      per_channel[1] = x.size(1);
      dx.addcmul_(dy, scale.view(per_channel));
    }
    const auto as_weight = [&](const Tensor& sum) {
      return weight.defined() ? sum.to(weight.scalar_type()) : Tensor();
    };
    return {dx.to(saved[0].scalar_type()), as_weight(of_weight), as_weight(of_bias), Tensor()};
  }
};

}  // namespace

SyncBatchNormImpl::SyncBatchNormImpl(const torch::nn::BatchNormOptions& options, Rank& rank)
    : NormImplBase(options), rank_(rank) {}

// Keeps the parameters that autograd and optimizers know. A module's table of buffers cannot be changed, so buffers
// share memory.
void SyncBatchNormImpl::take(const Tensor& its_weight, const Tensor& its_bias,
                             const std::array<Tensor, 3>& its_buffers) {
  parameters_["weight"] = weight = its_weight;
  parameters_["bias"] = bias = its_bias;
  const std::array<Tensor*, 3> buffers{&running_mean, &running_var, &num_batches_tracked};
  for (size_t i = 0; i < buffers.size(); ++i) {
    if (its_buffers[i].defined()) buffers[i]->set_data(its_buffers[i]);
  }
}

void SyncBatchNormImpl::_check_input_dim(const Tensor& x) {
  if (x.dim() >= 2 && x.dim() <= 5 && x.size(1) == options.num_features()) return;
  throw Error(rank_.name() + ": SyncBatchNorm: x is " + classic_text(x.sizes()) + "; it must be [n, " +
              std::to_string(options.num_features()) + "], with up to 3 more dimensions");
}

Tensor SyncBatchNormImpl::forward(const Tensor& x) {
  _check_input_dim(x);
  if (!is_training()) {
    const bool own_samples = !options.track_running_stats();
    return torch::nn::functional::detail::batch_norm(x, running_mean, running_var, weight, bias, own_samples,
                                                     /*momentum=*/0, options.eps());
  }
  Normalisation how{{}, options.eps(), rank_};
  {
    const torch::NoGradGuard no_grad;
    how.statistics = statistics_of_all(x, rank_);
    const Tensor unbiased = how.statistics.variance * (how.statistics.count / (how.statistics.count - 1));
    if (options.track_running_stats()) follow(how.statistics.mean, unbiased);
  }
  const auto optional = [](const Tensor& tensor) { return tensor.defined() ? std::optional(tensor) : std::nullopt; };
  return Normalise::apply(x, optional(weight), optional(bias), how);
}

// Without a momentum the running statistics are the mean over all batches so far.
void SyncBatchNormImpl::follow(const Tensor& mean, const Tensor& variance) {
  num_batches_tracked += 1;
  const auto move = [&](Tensor& running, const Tensor& of_batch) {
    const Tensor now = of_batch.to(running.scalar_type());
    if (options.momentum()) {
      running.lerp_(now, *options.momentum());
    } else {
      running += (now - running) / num_batches_tracked;
    }
  };
  move(running_mean, mean);
  move(running_var, variance);
}

void SyncBatchNormImpl::pretty_print(std::ostream& out) const {
  out << "lockstep::SyncBatchNorm(" << options.num_features() << ", " << rank_.world_size() << " ranks)";
}

}  // namespace lockstep

// Criterion: makes a network's output and the targets a loss. MeanOver is one that is a mean over something else than
// samples: over tokens, pixels, boxes, or the weights of classes.
//
//   const auto words = [](const torch::Tensor& y) { return y.ne(kPadding).sum(); };
//   net.loss(batch, lockstep::MeanOver(sum_of_losses, words)).backward();
//
// Both are as thread-safe as the functions that they are made of. Cost of a MeanOver: one allreduce of two numbers for
// each whole batch.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/enum.h>
#include <torch/nn/pimpl.h>
#include <lockstep/data/data.hpp>
#include <lockstep/data/sample_function.hpp>

#include <concepts>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>

namespace lockstep {

namespace detail {

// Tells whether Type is a module holder (TORCH_MODULE). Do not ask whether it can be called: its operator() seems to
// take any arguments, and fails only when it is compiled.
template <class Type>
concept HoldsModule = requires {
  typename Type::ContainedType;
  requires std::derived_from<Type, torch::nn::ModuleHolder<typename Type::ContainedType>>;
};

// Says that LibTorch's loss of these options divides by the weights of the targets that it counts.
template <class Options>
concept CountsTargets = requires(const Options& options) {
  options.weight().defined();
  options.ignore_index();
};

// Gives the weights' sum of the targets y that are not `ignored`, float64 []; without weights their number. If y is of
// probabilities, gives the number of their rows.
at::Tensor counted_targets(const at::Tensor& y, const at::Tensor& weight, int64_t ignored);

}  // namespace detail

// A MeanOver is a loss of the whole batch: the losses' sum over all ranks, divided by a count over all ranks, whatever
// part of either a rank has. A batch without any count has the loss 0, where LibTorch's would be NaN. Loss::value() is
// this rank's share of the mean, times global_size / size(), and Loss::global_item() the mean.
class MeanOver {
 public:
  using Count = std::function<at::Tensor(const Batch& batch)>;

  // `sum` is a function (y_hat, y), or (y_hat, batch), and gives the losses' sum over some samples, one number. Give it
  // in 32 bits or more, since 16 hold no large sums. `of` is a function (y) or (batch), and gives their count, one
  // number of any type. A whole batch is counted once for each loss, before the net computes; with a grain, grain by
  // grain. So change y or `more` before in_parts(), and count nothing that the net gives.
  template <detail::OfSamples Sum, class Of>
  MeanOver(Sum sum, Of of) : sum_(std::move(sum)) {
    if constexpr (std::invocable<Of&, const at::Tensor&>) {
      of_ = [of = std::move(of)](const Batch& batch) mutable -> at::Tensor { return of(batch.y); };
    } else {
      of_ = std::move(of);
    }
  }

  const detail::SampleFunction& sum() const { return sum_; }
  const Count& of() const { return of_; }

 private:
  detail::SampleFunction sum_;
  Count of_;
};

// Makes a network's output and the targets a loss, the mean over the samples, or a MeanOver. Takes any callable
// (y_hat, y) -> scalar tensor, or (y_hat, batch) where a mask counts; or one of torch::nn::functional's losses by its
// name; or a module, such as torch::nn::MSELoss(). cross_entropy and nll_loss, with options or as modules, are
// MeanOvers: LibTorch divides by the number or the weights of the targets that ignore_index leaves in. By name alone
// they are means over samples, and targets of -100 are refused.
//
// The first three losses of each C++ type of criterion are checked in each net: the criterion is called on both halves
// of the samples too, without gradients. The mean of the two must be the loss, or backward's averages over the ranks
// would be wrong: then there is an Error.
class Criterion {
 public:
  template <class Function>
  requires(!detail::HoldsModule<Function>) && detail::OfSamples<Function>  //
      Criterion(Function function) : function_(std::move(function)) {}
  Criterion(const MeanOver& mean) : function_(mean.sum()), of_(mean.of()) {}
  template <detail::HoldsModule Holder>
  Criterion(Holder holder)
      : function_(
            [holder](const at::Tensor& y_hat, const at::Tensor& y) mutable { return holder->forward(y_hat, y); }) {
    using Module = typename Holder::ContainedType;
    if constexpr (requires { requires detail::CountsTargets<decltype(holder->options)>; }) {
      auto options = holder->options;
      options.weight(holder->weight);  // it may have moved to a GPU
      take_options(options, [](const auto& sums) {
        return [module = std::make_shared<Module>(sums)](const at::Tensor& y_hat, const at::Tensor& y) {
          return module->forward(y_hat, y);
        };
      });
    } else if constexpr (requires { holder->options; }) {
      take_options(holder->options, nullptr);
    }
  }
  template <class Options>
  Criterion(at::Tensor (*function)(const at::Tensor&, const at::Tensor&, const Options&))
      : Criterion([function](const at::Tensor& y_hat, const at::Tensor& y) { return function(y_hat, y, Options{}); }) {}
  // Takes the loss with its options. Throws Error for another reduction than the mean.
  template <class Options>
  Criterion(at::Tensor (*function)(const at::Tensor&, const at::Tensor&, const Options&),
            const std::type_identity_t<Options>& options)
      : Criterion(
            [function, options](const at::Tensor& y_hat, const at::Tensor& y) { return function(y_hat, y, options); }) {
    take_options(options, [function](const Options& sums) {
      return [function, sums](const at::Tensor& y_hat, const at::Tensor& y) { return function(y_hat, y, sums); };
    });
  }
  // Says, as a compile error of anything else, what to give instead.
  template <class Other>
  requires(!detail::HoldsModule<Other> && !detail::OfSamples<Other>)  //
      Criterion(Other) {
    static_assert(sizeof(Other) == 0,
                  "A criterion takes (const torch::Tensor& y_hat, const torch::Tensor& y), or (y_hat, const "
                  "lockstep::Batch& batch). Where forward gives more than one Tensor, give loss() a function of the "
                  "batch: net.loss(batch, [&](const lockstep::Batch& part) { auto [a, b] = net(part.x); ... })");
  }

  // Takes a function that must not be called on halves, because it keeps a state or counts calls. Or takes one that is
  // meant to be no mean over samples: the value of each rank and of each part then counts by its samples. A function
  // that calls other ranks, draws random numbers or throws for a half needs no such mark.
  static Criterion unchecked(Criterion criterion) {
    criterion.is_checked_ = false;
    return criterion;
  }
  bool is_checked() const { return is_checked_; }

  at::Tensor operator()(const at::Tensor& y_hat, const at::Tensor& y) const {
    return (*this)(y_hat, {.x = {}, .y = y});
  }
  at::Tensor operator()(const at::Tensor& y_hat, const Batch& batch) const;

  // Give what it was made of: a mean over samples, or where `of` is not empty a MeanOver's sum and count.
  const detail::SampleFunction& function() const { return function_; }
  const MeanOver::Count& of() const { return of_; }

 private:
  // sum_with(options) makes the function that computes the sum.
  template <class Options>
  void take_options(const Options& options, const auto& sum_with) {
    if constexpr (requires { options.reduction(); })
      check_reduction(torch::enumtype::get_enum_name(options.reduction()));
    if constexpr (detail::CountsTargets<Options>) {
      // 16 bits hold no sums.
      Options sums = Options(options).reduction(torch::kSum), wide = sums;
      if (wide.weight().defined()) wide.weight(wide.weight().to(at::kFloat));
      function_ = [sum = detail::SampleFunction(sum_with(sums)), wide = detail::SampleFunction(sum_with(wide))](
                      const at::Tensor& y_hat, const at::Tensor& y) {
        return y_hat.element_size() < 4 ? wide(y_hat.to(at::kFloat), y) : sum(y_hat, y);
      };
      of_ = [weight = options.weight(), ignored = options.ignore_index()](const Batch& batch) {
        return detail::counted_targets(batch.y, weight, ignored);
      };
    }
  }
  static void check_reduction(const std::string& name);

  detail::SampleFunction function_;
  MeanOver::Count of_;
  bool is_checked_ = true;
};

}  // namespace lockstep

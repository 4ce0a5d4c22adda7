#include <lockstep/data_parallel/criterion.hpp>

#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <lockstep/base/error.hpp>

namespace lockstep {

// LibTorch divides by the number of rows where targets are probabilities, whatever the classes' weights are.
at::Tensor detail::counted_targets(const at::Tensor& y, const at::Tensor& weight, int64_t ignored) {
  if (y.is_floating_point()) {
    const int64_t classes = y.size(y.dim() > 1 ? 1 : 0);
    return at::full({}, static_cast<double>(y.numel()) / static_cast<double>(classes), y.options().dtype(at::kDouble));
  }
  const at::Tensor counts = y != ignored;
  if (!weight.defined()) return counts.sum();
  const at::Tensor weights =
      weight.to(at::kDouble).index_select(0, y.masked_fill(counts.logical_not(), 0).flatten().to(at::kLong));
  return weights.mul(counts.flatten()).sum();
}

at::Tensor Criterion::operator()(const at::Tensor& y_hat, const Batch& batch) const {
  const at::Tensor loss = function_(y_hat, batch);
  if (!of_) return loss;
  const at::Tensor sum = loss.element_size() < 4 ? loss.to(at::kFloat) : loss;  // 16 bits would round once more
  const int64_t samples = batch.x.defined() ? batch.size() : batch.y.size(0);   // a pipeline's last stage has no x
  if (const at::Tensor& per_count = batch.samples_per_count; per_count.defined()) {
    if (per_count.is_cpu()) return sum * (per_count.item<double>() / static_cast<double>(samples));
    return sum * (per_count / static_cast<double>(samples)).to(sum.options());
  }
  if (samples < batch.global_size) {
    throw Error(
        "a MeanOver of a part of a batch needs to know the whole batch's count. Give it to net.loss(batch, criterion), "
        "and do not call it in a function of your own",
        {.options = {"criterion"}});
  }
  return sum / of_(batch).to(sum.options());
}

void Criterion::check_reduction(const std::string& name) {
  if (name.find("Mean") != name.npos) return;
  throw Error("a criterion with the reduction " + name +
              ": a part's loss must be the mean over its samples, so that the parts' average is the whole batch's. "
              "Leave the option `reduction` at its default; or give MeanOver(sum, of) the sum, and what to divide by");
}

}  // namespace lockstep

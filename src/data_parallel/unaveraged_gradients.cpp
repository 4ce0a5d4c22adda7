#include "unaveraged_gradients.hpp"

#include <c10/core/GradMode.h>
#include <lockstep/base/error.hpp>

#include "devices/cuda_graph.hpp"
#include "flat_view.hpp"

namespace lockstep {
namespace {

constexpr int kNotedOnGpu = 3;  // a GPU's parameter is noted and compared at most so often

}  // namespace

// One parameter is enough to tell, and the last layer's bias, which comes first, is small. The value is compared, and
// not the version counter, because LibTorch's optimizers bypass that.
void UnaveragedGradients::note(const std::string& parameter_name, const at::Tensor& parameter) {
  if (rank_.world_size() == 1 || (rank_.device().is_cuda() && is_recording())) return;
  const bool on_gpu = !rank_.device().is_cpu();
  const c10::AutoGradMode no_grad(false);
  if (value_.defined()) {  // so a whole loop of such backwards ends at its second one
    if (noted_parameter_ == parameter.unsafeGetTensorImpl() && !(on_gpu && ++compared_ > kNotedOnGpu)) check();
    return;
  }
  if (on_gpu && ++noted_ > kNotedOnGpu) return;  // the host waits for what is compared
  noted_parameter_ = parameter.unsafeGetTensorImpl();
  parameter_name_ = parameter_name;
  parameter_ = parameter.detach();
  value_ = parameter_.clone();
}

void UnaveragedGradients::forget() {
  parameter_.reset();
  value_.reset();
}

void UnaveragedGradients::check() const {
  if (!value_.defined() || same_values(value_, parameter_)) return;
  throw Error(name_ + ": " + parameter_name_ +
              " was changed after a backward whose gradients were never averaged, so the ranks' networks differ now. "
              "Call net.loss(batch, criterion).backward(), or net.mean(…).backward(), in place of the backward() of a "
              "tensor; end a no_sync() guard before the last backward of a step; nets that one loss trains belong into "
              "one module, and so into one DataParallel");
}

}  // namespace lockstep

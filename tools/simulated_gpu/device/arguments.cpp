#include "arguments.hpp"

#include <ATen/core/List.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include "generator.hpp"

namespace simulated {
namespace {

using OptionalTensors = c10::List<std::optional<at::Tensor>>;

std::optional<at::Tensor> optional(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional(tensor) : std::nullopt;
}

at::Tensor zero_of(const at::Tensor& tensor) {
  if (!is_here(tensor)) return tensor;
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU)).zero_();
}

}  // namespace

std::vector<RealArguments::Make> RealArguments::for_one_task() const {
  std::vector<Make> all = makes;
  for (const auto& [number, generator] : generators) {
    all[number] = [own = static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->for_one_task()] { return own; };
  }
  return all;
}

void Arguments::add(const c10::IValue& value, bool writes) {
  const auto add_both = [&](const c10::IValue& same) {
    zeros_.emplace_back([same] { return same; });
    real_.makes.emplace_back([same] { return same; });
  };
  if (value.isTensor()) {
    zeros_.emplace_back([tensor = value.toTensor()] { return zero_of(tensor); });
    check_host(value.toTensor());
    real_.makes.push_back(real_of(value.toTensor(), writes));
  } else if (value.isTensorList()) {
    add_list(value.toTensorVector(), writes);
  } else if (value.isOptionalTensorList()) {
    add_indices(value.toOptionalTensorList());
  } else if (value.isDevice() && value.toDevice().type() == kType) {
    if (!named_ && value.toDevice().has_index()) named_ = value.toDevice().index();
    add_both(c10::Device(at::kCPU));
  } else if (value.isGenerator() && value.toGenerator().device().type() == kType) {
    zeros_.emplace_back([] { return at::detail::createCPUGenerator(1); });
    real_.generators.emplace_back(real_.makes.size(), value.toGenerator());
    real_.makes.emplace_back();
  } else {
    add_both(value);
  }
}

void Arguments::add_scratch(const at::Tensor& output) {
  named_ = output.get_device();
  const auto make = [sizes = output.sizes().vec(), options = output.options().device(at::kCPU)] {
    return at::empty(sizes, options);
  };
  zeros_.emplace_back(make);
  real_.makes.emplace_back(make);
}

void Arguments::add_list(const std::vector<at::Tensor>& tensors, bool writes) {
  std::vector<Make> parts;
  for (const auto& tensor : tensors) {
    check_host(tensor);
    parts.push_back(real_of(tensor, writes));
  }
  zeros_.emplace_back([tensors] {
    c10::List<at::Tensor> list;
    for (const auto& tensor : tensors) list.push_back(zero_of(tensor));
    return list;
  });
  real_.makes.emplace_back([parts] {
    c10::List<at::Tensor> list;
    for (const auto& part : parts) list.push_back(part().toTensor());
    return list;
  });
}

// The indices of an indexing may lie on the host.
void Arguments::add_indices(const OptionalTensors& tensors) {
  std::vector<at::Tensor> indices;
  std::vector<Make> parts;
  for (const std::optional<at::Tensor>& tensor : tensors) {
    indices.push_back(tensor.value_or(at::Tensor()));
    parts.push_back(real_of(indices.back(), false));
  }
  zeros_.emplace_back([indices] {
    OptionalTensors list;
    for (const auto& tensor : indices) list.push_back(optional(zero_of(tensor)));
    return list;
  });
  real_.makes.emplace_back([parts] {
    OptionalTensors list;
    for (const auto& part : parts) list.push_back(optional(part().toTensor()));
    return list;
  });
}

// A tensor on the host is read when the call is made, as a kernel's arguments are.
Arguments::Make Arguments::real_of(const at::Tensor& tensor, bool writes) {
  if (!tensor.defined()) return [tensor] { return tensor; };
  if (!is_here(tensor)) return [copy = tensor.detach().clone()] { return copy; };
  TORCH_CHECK(named_.value_or(tensor.get_device()) == tensor.get_device(), what_,
              ": Expected all tensors to be on the same device, but found at least two devices, ", kType, ":", *named_,
              " and ", tensor.device());
  named_ = tensor.get_device();
  const View view(tensor);
  uses_.push_back({view, writes});
  return [view] { return view.on_stream(); };
}

void Arguments::check_host(const at::Tensor& tensor) const {
  if (!tensor.defined() || is_here(tensor) || tensor.dim() == 0) return;
  TORCH_CHECK(false, what_, ": Expected all tensors to be on the same device, but found at least two devices, ", kType,
              " and ", tensor.device());
}

torch::jit::Stack made(const std::vector<Arguments::Make>& arguments) {
  torch::jit::Stack stack;
  for (const auto& argument : arguments) stack.push_back(argument());
  return stack;
}

}  // namespace simulated

// All other operators of ATen: the operator is tried on zeros of the host, its results are allocated, and the call is
// queued, to be done by the CPU's kernel on the stream's thread. As a CUDA kernel it holds addresses, no tensors.
#include <ATen/Context.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <set>

#include "arguments.hpp"
#include "generator.hpp"
#include "guard.hpp"
#include "own_operators.hpp"
#include "rules.hpp"

namespace simulated {
namespace {

using Values = std::vector<c10::IValue>;

// The sizes of these results, or the results themselves, are values for which the host waits, as with CUDA.
bool gives_values(const std::string& name) {
  static const std::set<std::string> names = {"aten::bincount",          "aten::equal",   "aten::masked_select",
                                              "aten::nonzero",           "aten::_unique", "aten::_unique2",
                                              "aten::unique_consecutive"};
  return names.count(name) > 0;
}

// Operators whose CPU kernels give their output another size on the way, which the device's memory cannot have.
bool resizes_on_the_way(const std::string& name) {
  static const std::set<std::string> names = {"aten::huber_loss", "aten::mse_loss", "aten::smooth_l1_loss"};
  return names.count(name) > 0;
}

// A random operator that is given no generator takes the device's.
bool draws(const c10::Argument& argument, const c10::IValue& value) {
  return value.isNone() && argument.type()->repr_str().find("Generator") != std::string::npos;
}

bool is_written(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

// `resized`: arguments that are results' places of another size than the results.
Arguments arguments_of(const c10::FunctionSchema& schema, const Values& given, const std::set<size_t>& resized) {
  Arguments arguments(schema.name());
  for (size_t i = 0; i < given.size(); ++i) {
    const auto& argument = schema.arguments()[i];
    if (resized.count(i) > 0) {
      arguments.add_scratch(given[i].toTensor());
    } else {
      arguments.add(draws(argument, given[i]) ? c10::IValue(default_generator(current_device())) : given[i],
                    is_written(argument));
    }
  }
  return arguments;
}

// The results of one call: those that the call makes, with the places that their values go to.
struct Results {
  struct Fresh {
    size_t result;               // its number
    std::optional<size_t> part;  // its number in a list
    View view;
  };
  Values values;
  std::vector<Fresh> fresh;
};

at::Tensor like(const at::Tensor& shape, int device) {
  return empty_strided(shape.sizes(), shape.strides(), shape.scalar_type(), {}, device_at(device), {});
}

// Finds the argument that comes back as this result.
size_t argument_of(const c10::FunctionSchema& schema, const c10::AliasInfo& alias) {
  size_t index = 0;
  const auto& arguments = schema.arguments();
  while (arguments.at(index).alias_info() == nullptr || !(*arguments[index].alias_info() == alias)) ++index;
  return index;
}

// The arguments that are results' places, and of another size than the results.
std::set<size_t> resized_outputs(const c10::FunctionSchema& schema, const Values& given,
                                 const torch::jit::Stack& shapes) {
  std::set<size_t> resized;
  for (size_t i = 0; i < schema.returns().size(); ++i) {
    const auto* const alias = schema.returns()[i].alias_info();
    if (alias == nullptr || !shapes[i].isTensor()) continue;
    TORCH_CHECK(alias->isWrite(), schema.name(), " gives a view, for which the simulated device has no kernel");
    const size_t argument = argument_of(schema, *alias);
    const bool same = given[argument].toTensor().sizes() == shapes[i].toTensor().sizes();
    if (!same || resizes_on_the_way(schema.name())) resized.insert(argument);
  }
  return resized;
}

Results results_of(const c10::FunctionSchema& schema, const Values& given, const torch::jit::Stack& shapes,
                   const std::set<size_t>& resized, int device, bool by_value) {
  Results results;
  for (size_t i = 0; i < schema.returns().size(); ++i) {
    if (const auto* const alias = schema.returns()[i].alias_info()) {
      const size_t argument = argument_of(schema, *alias);
      if (resized.count(argument) > 0) {
        given[argument].toTensor().resize_(shapes[i].toTensor().sizes());
        results.fresh.push_back({i, std::nullopt, View(given[argument].toTensor())});
      }
      results.values.push_back(given[argument]);
    } else if (shapes[i].isTensor() && !shapes[i].toTensor().defined()) {
      results.values.emplace_back(at::Tensor());
    } else if (shapes[i].isTensor()) {
      const at::Tensor result = like(shapes[i].toTensor(), device);
      if (by_value) result.copy_(shapes[i].toTensor());
      results.fresh.push_back({i, std::nullopt, View(result)});
      results.values.emplace_back(result);
    } else if (shapes[i].isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& shape : shapes[i].toTensorVector()) {
        list.push_back(like(shape, device));
        results.fresh.push_back({i, list.size() - 1, View(list.get(list.size() - 1))});
      }
      results.values.emplace_back(list);
    } else {
      TORCH_CHECK(by_value, schema.name(), " gives a ", shapes[i].tagKind(), ", which a device cannot know in time");
      results.values.push_back(shapes[i]);
    }
  }
  return results;
}

// Does `op` with the arguments on the stack, in the order of the current stream.
void call(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t count = schema.arguments().size();
  const Values given(stack->end() - static_cast<std::ptrdiff_t>(count), stack->end());
  check_rules(schema, given);
  Arguments arguments = arguments_of(schema, given, {});
  const c10::OptionalDeviceGuard guard(device_at(arguments.device()));
  Stream& stream = current_stream(arguments.device());

  const bool by_value = gives_values(schema.name());
  if (by_value) stream.synchronize();
  torch::jit::Stack shapes = made(by_value ? arguments.real().for_one_task() : arguments.zeros());
  {
    const at::AutoDispatchBelowADInplaceOrView no_autograd;
    op.callBoxed(&shapes);
  }
  const auto resized = resized_outputs(schema, given, shapes);
  if (!resized.empty()) arguments = arguments_of(schema, given, resized);
  Results results = results_of(schema, given, shapes, resized, arguments.device(), by_value);
  torch::jit::drop(*stack, count);
  for (auto& value : results.values) stack->push_back(std::move(value));
  if (by_value) return;

  auto uses = arguments.uses();
  for (const auto& fresh : results.fresh) uses.push_back({fresh.view, true});
  launch(stream,
         {schema.name(), uses, [op, real = arguments.real(), places = results.fresh]() -> Task {
            return [op, own = real.for_one_task(), places] {
              auto values = made(own);
              op.callBoxed(&values);
              for (const auto& [result, part, view] : places) {
                view.on_stream().copy_(part ? values[result].toTensorVector()[*part] : values[result].toTensor());
              }
            };
          }});
}

void any_operator(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  call(op, stack);
}

// LibTorch asks a device without cuDNN for its own convolution.
void convolution(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "");
  call(op, stack);
}

void convolution_backward(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", "");
  const auto weight = (*stack)[stack->size() - 8].toTensor();
  stack->insert(stack->end() - 7, c10::IValue(std::vector<int64_t>{weight.size(0)}));  // bias_sizes
  call(op, stack);
}

}  // namespace

TORCH_LIBRARY_IMPL(_, SIMULATED_TYPE, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&any_operator>());
}

TORCH_LIBRARY_IMPL(aten, SIMULATED_TYPE, library) {
  library.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  library.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
  // Else ATen would call an operator for each tensor; CUDA has one kernel for all.
  for (const char* const for_all : {"_foreach_norm.Scalar", "_foreach_zero_"}) {
    library.impl(for_all, torch::CppFunction::makeFromBoxedFunction<&any_operator>());
  }
}

}  // namespace simulated

#include <c10/core/GradMode.h>
#include <torch/nn/functional/loss.h>
#include <lockstep/base/error.hpp>
#include <lockstep/models/models.hpp>
#include <lockstep/scratch/allreduce.hpp>
#include <lockstep/scratch/on_each_device.hpp>
#include <lockstep/scratch/split_batch.hpp>
#include <lockstep/scratch/train_batch.hpp>

#include <cmath>
#include <exception>
#include <string>

#include "base/classic.hpp"
#include "base/number_text.hpp"

namespace lockstep {

namespace F = torch::nn::functional;

using Params = std::vector<at::Tensor>;

Params get_params(const Params& params, const c10::Device& device) {
  const at::NoGradGuard no_grad;
  Params copies;
  for (const auto& param : params) {
    const std::string name = "get_params: parameter " + std::to_string(copies.size());
    if (!param.defined()) throw Error(name + " is undefined");
    if (!param.is_floating_point() && !param.is_complex()) {
      throw Error(name + " is of type " + c10::toString(param.scalar_type()) +
                  ", which has no gradients; make it float");
    }
    at::Tensor copy = [&] {
      try {
        return param.detach().to(device, param.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
      } catch (const c10::Error& error) {
        std::throw_with_nested(Error(
            name + " cannot be copied to " + device.str() + ": " + error.what_without_backtrace(), {Error::machine}));
      }
    }();
    copy.requires_grad_();
    copy.mutable_grad() = at::zeros_like(copy);
    copies.push_back(copy);
  }
  return copies;
}

namespace {

// ---- Checks of the arguments ---------------------------------------------------------------------------------------

std::string describe(const std::vector<Params>& device_params, size_t device, size_t param) {
  const at::Tensor& tensor = device_params[device][param];
  return classic_text("parameter ", param, " of device ", device, " is ", tensor.sizes(), " ",
                      c10::toString(tensor.scalar_type()), " on ", tensor.device());
}

void check_params(const std::vector<Params>& device_params, const Devices& devices) {
  if (devices.empty()) throw Error("train_batch: the list of devices is empty");
  if (device_params.size() != devices.size()) {
    throw Error("train_batch: " + std::to_string(devices.size()) + " devices need as many lists of parameters, not " +
                std::to_string(device_params.size()));
  }
  const Params& first = device_params[0];
  for (size_t i = 0; i < devices.size(); ++i) {
    if (device_params[i].empty() || device_params[i].size() != first.size()) {
      throw Error("train_batch: every device needs the same parameters, but device 0 has " +
                  std::to_string(first.size()) + " and device " + std::to_string(i) + " has " +
                  std::to_string(device_params[i].size()));
    }
    for (size_t p = 0; p < first.size(); ++p) {
      const at::Tensor& param = device_params[i][p];
      if (!param.defined() || !param.is_leaf() || !param.requires_grad()) {
        throw Error("train_batch: parameter " + std::to_string(p) + " of device " + std::to_string(i) +
                    " must be a leaf that requires gradients; get_params makes such copies");
      }
      if (param.device() != devices[i]) {
        throw Error("train_batch: " + describe(device_params, i, p) + ", not on " + devices[i].str());
      }
      if (param.sizes() != first[p].sizes() || param.scalar_type() != first[p].scalar_type() ||
          param.device().type() != first[p].device().type()) {
        throw Error("train_batch: the copies of a parameter must agree: " + describe(device_params, 0, p) + ", " +
                    describe(device_params, i, p));
      }
      for (size_t j = 0; j < i; ++j) {
        if (!param.is_alias_of(device_params[j][p])) continue;
        throw Error("train_batch: devices " + std::to_string(j) + " and " + std::to_string(i) +
                    " share the memory of parameter " + std::to_string(p) + "; get_params makes independent copies");
      }
    }
  }
}

// ---- The steps -----------------------------------------------------------------------------------------------------

at::Tensor checked_sum(const at::Tensor& loss) {
  if (loss.defined() && loss.dim() == 0) return loss;
  throw Error("sum_of_losses must return one number, the sum of the samples' losses; it returned " +
              (loss.defined() ? "a tensor of " + std::to_string(loss.numel()) + " values" : "an undefined tensor"));
}

void set_gradients_to_zero(const Params& params) {
  for (const auto& param : params) {
    if (param.grad().defined()) {
      param.grad().zero_();
    } else {
      param.mutable_grad() = at::zeros_like(param);
    }
  }
}

// Computes the section's `sgd`. It does not divide by the batch size, since the loss is divided already.
void sgd(const Params& params, double lr) {
  const at::NoGradGuard no_grad;
  for (const auto& param : params) param.sub_(param.grad(), lr);
}

at::Tensor lenet_loss(const at::Tensor& x, const at::Tensor& y, const Params& params) {
  return F::cross_entropy(lenet(x, params), y, F::CrossEntropyFuncOptions().reduction(torch::kSum));
}

std::vector<at::Tensor> gradients_of(const std::vector<Params>& device_params, size_t param) {
  std::vector<at::Tensor> gradients;
  gradients.reserve(device_params.size());
  for (const auto& params : device_params) gradients.push_back(params[param].grad());
  return gradients;
}

}  // namespace

double train_batch(const at::Tensor& x, const at::Tensor& y, std::vector<Params>& device_params, const Devices& devices,
                   double lr, const SumOfLosses& sum_of_losses) {
  check_params(device_params, devices);
  if (!(std::isfinite(lr) && lr >= 0)) {
    throw Error("train_batch: the learning rate must be a finite number >= 0, not " + number_text(lr));
  }
  const auto parts = split_batch(x, y, devices);
  const int64_t samples = x.size(0);
  if (samples == 0) throw Error("train_batch: the batch is empty, so its mean loss does not exist");

  // Runs forward and backward on every device. Each part's loss is divided by the size of the whole batch. So the
  // devices' gradients sum up to the gradient of the whole batch's mean loss, even where parts are uneven or empty.
  std::vector<at::Tensor> losses(devices.size());
  on_each_device(devices, [&](size_t i) {
    const at::AutoGradMode record(true);
    set_gradients_to_zero(device_params[i]);
    if (parts.first[i].size(0) == 0) return;
    const at::Tensor loss = checked_sum(sum_of_losses(parts.first[i], parts.second[i], device_params[i])) / samples;
    loss.backward();
    losses[i] = loss.detach();
  });

  for (size_t p = 0; p < device_params[0].size(); ++p) {
    std::vector<at::Tensor> gradients = gradients_of(device_params, p);
    allreduce(gradients);
  }
  for (const auto& params : device_params) sgd(params, lr);
  double sum = 0;  // read last, since the host then waits until a GPU has done the whole step
  for (const auto& loss : losses) sum += loss.defined() ? loss.item<double>() : 0.0;
  return sum;
}

double train_batch(const at::Tensor& x, const at::Tensor& y, std::vector<Params>& device_params, const Devices& devices,
                   double lr) {
  check_params(device_params, devices);
  const at::ScalarType type = device_params[0][0].scalar_type();
  if (x.defined() && x.scalar_type() != type) {
    throw Error(std::string("train_batch: the images x are ") + c10::toString(x.scalar_type()) +
                " and the parameters " + c10::toString(type) + "; they must be of one type");
  }
  if (y.defined() && (y.scalar_type() != at::kLong || y.dim() != 1)) {
    throw Error(std::string("train_batch: the labels y must be class indices, Long [n]; these are ") +
                c10::toString(y.scalar_type()) + " " + classic_text(y.sizes()));
  }
  return train_batch(x, y, device_params, devices, lr, lenet_loss);
}

}  // namespace lockstep

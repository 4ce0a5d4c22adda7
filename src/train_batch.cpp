#include <c10/core/GradMode.h>
#include <torch/nn/functional/loss.h>
#include <lockstep/allreduce.hpp>
#include <lockstep/error.hpp>
#include <lockstep/models.hpp>
#include <lockstep/on_each_device.hpp>
#include <lockstep/split.hpp>
#include <lockstep/train_batch.hpp>

#include <atomic>
#include <chrono>
#include <cmath>
#include <numeric>
#include <sstream>
#include <string>

namespace lockstep {

namespace F = torch::nn::functional;

using Params = std::vector<at::Tensor>;

Params get_params(const Params& params, const c10::Device& device) {
  const at::NoGradGuard no_grad;
  Params copies;
  for (const auto& param : params) {
    if (!param.defined()) throw Error("get_params: parameter " + std::to_string(copies.size()) + " is undefined");
    at::Tensor copy = param.detach().to(device, param.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
    copy.requires_grad_();
    copy.mutable_grad() = at::zeros_like(copy);
    copies.push_back(copy);
  }
  return copies;
}

namespace {

// ---- What train_batch accepts --------------------------------------------------------------------------------------

std::string describe(const std::vector<Params>& device_params, size_t device, size_t param) {
  const at::Tensor& tensor = device_params[device][param];
  std::ostringstream text;
  text << "parameter " << param << " of device " << device << " is " << tensor.sizes() << " "
       << c10::toString(tensor.scalar_type()) << " on " << tensor.device();
  return text.str();
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

void check_lr(const char* function, double lr) {
  if (std::isfinite(lr) && lr >= 0) return;
  throw Error(std::string(function) + ": the learning rate must be a finite number >= 0, not " + std::to_string(lr));
}

// ---- Its steps -----------------------------------------------------------------------------------------------------

at::Tensor checked_sum(const at::Tensor& loss) {
  if (loss.defined() && loss.dim() == 0) return loss;
  throw Error("sum_of_losses must return one number, the sum of the samples' losses; it returned " +
              (loss.defined() ? "a tensor of " + std::to_string(loss.numel()) + " values" : "an undefined tensor"));
}

void zero_gradients(const Params& params) {
  for (const auto& param : params) {
    if (param.grad().defined()) {
      param.grad().zero_();
    } else {
      param.mutable_grad() = at::zeros_like(param);
    }
  }
}

// The section's `sgd`; the division by the batch size is in the loss already.
void sgd(const Params& params, double lr) {
  const at::NoGradGuard no_grad;
  for (const auto& param : params) param.sub_(param.grad(), lr);
}

at::Tensor cross_entropy_sum(const at::Tensor& logits, const at::Tensor& y) {
  return F::cross_entropy(logits, y, F::CrossEntropyFuncOptions().reduction(torch::kSum));
}

at::Tensor lenet_loss(const at::Tensor& x, const at::Tensor& y, const Params& params) {
  return cross_entropy_sum(lenet(x, params), y);
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
  check_lr("train_batch", lr);
  const auto parts = split_batch(x, y, devices);
  const int64_t samples = x.size(0);
  if (samples == 0) throw Error("train_batch: the batch is empty, so its mean loss does not exist");

  // Forward and backward on every device. Each part's loss is divided by the size of the whole batch, so the sum of the
  // devices' gradients is the gradient of the whole batch's mean loss, even where parts are uneven or empty.
  std::vector<double> losses(devices.size(), 0.0);
  on_each_device(devices, [&](size_t i) {
    const at::AutoGradMode record(true);
    zero_gradients(device_params[i]);
    if (parts.first[i].size(0) == 0) return;
    const at::Tensor loss = checked_sum(sum_of_losses(parts.first[i], parts.second[i], device_params[i])) / samples;
    loss.backward();
    losses[i] = loss.item<double>();
  });

  for (size_t p = 0; p < device_params[0].size(); ++p) {
    std::vector<at::Tensor> gradients = gradients_of(device_params, p);
    allreduce(gradients);
  }
  for (const auto& params : device_params) sgd(params, lr);
  return std::accumulate(losses.begin(), losses.end(), 0.0);
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
                c10::toString(y.scalar_type()) + " " + c10::str(y.sizes()));
  }
  return train_batch(x, y, device_params, devices, lr, lenet_loss);
}

namespace {

int64_t count_correct(const at::Tensor& logits, const at::Tensor& y) {
  return logits.argmax(1).eq(y).sum().item<int64_t>();
}

double test_accuracy(const Dataset& test, const Params& params, const c10::Device& device) {
  const at::NoGradGuard no_grad;
  int64_t correct = 0;
  for (auto& batch : batches(test, {.size = 1000, .shuffle = false}, {.device = device})) {
    correct += count_correct(lenet(batch.x, params), batch.y);
  }
  return static_cast<double>(correct) / static_cast<double>(test.size());
}

void check_options(int64_t batch_size, double lr, const ImageData& data, const ScratchOptions& options) {
  if (batch_size < 1) throw Error("train: the batch size must be at least 1, not " + std::to_string(batch_size));
  if (options.epochs < 1) throw Error("train: it needs at least one epoch, not " + std::to_string(options.epochs));
  check_lr("train", lr);
  for (const Dataset& set : {data.train, data.test}) {
    if (!set.x.defined() || !set.y.defined() || set.size() == 0) throw Error("train: the data hold no samples");
  }
}

}  // namespace

std::vector<EpochMetrics> train(int num_devices, int64_t batch_size, double lr, const ImageData& data,
                                const ScratchOptions& options) {
  check_options(batch_size, lr, data, options);
  const Devices devices = try_gpus(num_devices);
  const Params params = lenet_params(options.seed);
  std::vector<Params> device_params;
  for (const auto& device : devices) device_params.push_back(get_params(params, device));

  std::atomic<int64_t> correct = 0;  // the devices count at the same time
  const SumOfLosses counting_loss = [&](const at::Tensor& x, const at::Tensor& y, const Params& weights) {
    const at::Tensor logits = lenet(x, weights);
    correct += count_correct(logits.detach(), y);
    return cross_entropy_sum(logits, y);
  };

  const auto samples = static_cast<double>(data.train.size());
  std::vector<EpochMetrics> history;
  for (int epoch = 1; epoch <= options.epochs; ++epoch) {
    correct = 0;
    double loss = 0;
    const auto start = std::chrono::steady_clock::now();
    for (auto& batch : batches(data.train, {.size = batch_size, .seed = options.seed, .epoch = epoch})) {
      const double mean = train_batch(batch.x, batch.y, device_params, devices, lr, counting_loss);
      loss += mean * static_cast<double>(batch.size());
    }
    for (const auto& device : devices) synchronize(device);  // a clock may stop only when GPUs have done their work
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;

    history.push_back({.epoch = epoch,
                       .train_loss = loss / samples,
                       .train_accuracy = static_cast<double>(correct) / samples,
                       .test_accuracy = test_accuracy(data.test, device_params[0], devices[0]),
                       .seconds = seconds.count()});
    if (options.on_epoch) options.on_epoch(history.back());
  }
  return history;
}

}  // namespace lockstep

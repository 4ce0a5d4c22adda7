// The section's heart: one replica of the parameters per device, one minibatch trained on all devices at once.
//
// Plain lists with one entry per device, nothing hidden: what a student reads first. examples/01_from_scratch.cpp shows
// all of it. Not thread-safe for the same parameters. For your own torch::nn::Module use lockstep::run and
// lockstep::DataParallel.
#pragma once

#include <ATen/core/Tensor.h>
#include <lockstep/devices/devices.hpp>

#include <cstdint>
#include <functional>
#include <vector>

namespace lockstep {

// An independent copy of `params` on `device`, each tensor a leaf that requires gradients, its gradient attached and
// zero. Section: `get_params` ("Data Synchronization"). Throws Error that names the place of an undefined tensor, and
// LibTorch's c10::Error for a type that has no gradients (integers) or a device that is not there.
std::vector<at::Tensor> get_params(const std::vector<at::Tensor>& params, const c10::Device& device);

// Trains one global minibatch `x` [n, 1, 28, 28], `y` [n] (int64) of LeNet: splits it, runs forward and backward on all
// devices at once, sums the gradients over the devices (allreduce) and updates every device's parameters by w -= lr *
// gradient of the mean loss over the whole batch. `device_params[i]` lies on devices[i]; parts may be uneven or empty.
// Every step starts with zero gradients; afterwards each parameter's grad() is the whole batch's, the same on every
// device. Returns the mean loss over the whole batch before the update.
// Section: `train_batch` ("Training"). Throws Error before any parameter is changed: lists of another length than
// `devices`; parameters that are no leafs requiring gradients, lie on another device, differ between devices or share
// memory; x and y that differ in n or type, or are empty; lr negative or not finite; a loss that fails on a device.
double train_batch(const at::Tensor& x, const at::Tensor& y, std::vector<std::vector<at::Tensor>>& device_params,
                   const Devices& devices, double lr);

// The same for any model given as a function: sum_of_losses(x, y, params) returns the sum (not the mean) of the
// samples' losses.
using SumOfLosses =
    std::function<at::Tensor(const at::Tensor& x, const at::Tensor& y, const std::vector<at::Tensor>& params)>;
double train_batch(const at::Tensor& x, const at::Tensor& y, std::vector<std::vector<at::Tensor>>& device_params,
                   const Devices& devices, double lr, const SumOfLosses& sum_of_losses);

}  // namespace lockstep

// This is the section's heart: each device has a replica of the parameters, and all train on one minibatch at once.
//
// It works on plain lists with one entry per device, and hides nothing: a student can read it first. All of it is in
// examples/01_from_scratch.cpp too. Not thread-safe for the same parameters. For your own torch::nn::Module use
// lockstep::run and lockstep::DataParallel.
#pragma once

#include <ATen/core/Tensor.h>
#include <lockstep/devices/devices.hpp>

#include <cstdint>
#include <functional>
#include <vector>

namespace lockstep {

// Copies `params` to `device`. Each copy is a leaf that requires gradients, with a gradient of zeros attached. Section:
// `get_params` ("Data Synchronization"). Throws Error, which names the place: an undefined tensor, a type
// that has no gradients (integers), a device that is not there.
std::vector<at::Tensor> get_params(const std::vector<at::Tensor>& params, const c10::Device& device);

// Trains LeNet on one global minibatch: `x` [n, 1, 28, 28] and `y` [n] (int64). It splits the minibatch, runs forward
// and backward on all devices at once, and sums the gradients over the devices (allreduce). Then it updates every
// device's parameters: w -= lr * gradient of the mean loss over the whole batch. Put `device_params[i]` on devices[i];
// parts may be uneven or empty. Every step starts with zero gradients. Afterwards each parameter's grad() is the whole
// batch's, the same on every device. Returns the mean loss over the whole batch before the update.
//
// Section: `train_batch` ("Training"). Throws Error, before any parameter is changed: a list has another length than
// `devices`; parameters are not leaves requiring gradients, lie on another device, differ between devices or share
// memory; x and y differ in n or type, or are empty; lr is negative or not finite; a loss fails on a device.
double train_batch(const at::Tensor& x, const at::Tensor& y, std::vector<std::vector<at::Tensor>>& device_params,
                   const Devices& devices, double lr);

// Trains any model that is given as a function. Let sum_of_losses(x, y, params) return the sum (not the mean) of the
// samples' losses.
using SumOfLosses =
    std::function<at::Tensor(const at::Tensor& x, const at::Tensor& y, const std::vector<at::Tensor>& params)>;
double train_batch(const at::Tensor& x, const at::Tensor& y, std::vector<std::vector<at::Tensor>>& device_params,
                   const Devices& devices, double lr, const SumOfLosses& sum_of_losses);

}  // namespace lockstep

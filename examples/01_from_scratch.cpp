// The section "Training on Multiple GPUs" (Dive into Deep Learning) from the first line to the last, with one thread
// per device instead of Python's asynchronous GPU calls. On a machine with fewer than two GPUs its "GPUs" are CPU
// ranks.
//
//   example_01_from_scratch [epochs, default 10] [folder with Fashion-MNIST's IDX files]
//
// Expected output, from a run with 1 epoch on two CPU cores that had other work to do as well (the seconds are no
// measurement; with so small initial weights the first epoch learns next to nothing, see lenet_params):
//
//   lenet: images [2, 1, 28, 28] -> logits [2, 10]
//
//   b1 weight:  0  0  0  0  0  0  0  0  0  0  0  0  0  0  0  0  0  0  0  0
//   [ CPUFloatType{1,20} ]
//   b1 grad:  0  0  0  0  0  0  0  0  0  0  0  0  0  0  0  0  0  0  0  0
//   [ CPUFloatType{1,20} ]
//
//   before allreduce:
//    1  1
//   [ CPUFloatType{1,2} ]
//    2  2
//   [ CPUFloatType{1,2} ]
//   after allreduce:
//    3  3
//   [ CPUFloatType{1,2} ]
//    3  3
//   [ CPUFloatType{1,2} ]
//
//   input:
//     0   1   2   3   4
//     5   6   7   8   9
//    10  11  12  13  14
//    15  16  17  18  19
//   [ CPULongType{4,5} ]
//   load into [cpu, cpu]
//   output:
//    0  1  2  3  4
//    5  6  7  8  9
//   [ CPULongType{2,5} ]
//    10  11  12  13  14
//    15  16  17  18  19
//   [ CPULongType{2,5} ]
//
//   one minibatch: loss 2.302588, after one update 2.301913; the devices' parameters are equal
//
//   train(1, 256, 0.2)
//   epoch  1: train loss 2.303, test acc 0.100
//   test acc: 0.10, 63.5 sec/epoch on [cpu]
//
//   train(2, 256, 0.2)
//   epoch  1: train loss 2.303, test acc 0.100
//   test acc: 0.10, 53.5 sec/epoch on [cpu, cpu]
#include <lockstep/book.hpp>
#include <lockstep/devices/device_info.hpp>
#include <lockstep/lockstep.hpp>
#include <lockstep/models.hpp>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <iostream>

namespace {

using lockstep::Devices;
using Params = std::vector<torch::Tensor>;
namespace F = torch::nn::functional;

// "A Toy Network": LeNet as a list of weights and a function. (The library has both too, as lenet_params and lenet.)
Params init_params() {
  torch::manual_seed(0);
  const double scale = 0.01;
  const auto W1 = torch::randn({20, 1, 3, 3}) * scale, b1 = torch::zeros(20);
  const auto W2 = torch::randn({50, 20, 5, 5}) * scale, b2 = torch::zeros(50);
  const auto W3 = torch::randn({800, 128}) * scale, b3 = torch::zeros(128);
  const auto W4 = torch::randn({128, 10}) * scale, b4 = torch::zeros(10);
  return {W1, b1, W2, b2, W3, b3, W4, b4};
}

torch::Tensor lenet(const torch::Tensor& x, const Params& params) {
  const auto h1_conv = torch::conv2d(x, params[0], params[1]);
  const auto h1 = torch::avg_pool2d(torch::relu(h1_conv), /*kernel_size=*/2, /*stride=*/2);
  const auto h2_conv = torch::conv2d(h1, params[2], params[3]);
  const auto h2 = torch::avg_pool2d(torch::relu(h2_conv), /*kernel_size=*/2, /*stride=*/2);
  const auto h3 = torch::relu(torch::mm(h2.flatten(1), params[4]) + params[5]);
  return torch::mm(h3, params[6]) + params[7];
}

torch::Tensor sum_of_losses(const torch::Tensor& x, const torch::Tensor& y, const Params& params) {
  return F::cross_entropy(lenet(x, params), y, F::CrossEntropyFuncOptions().reduction(torch::kSum));
}

void a_toy_network() {
  const torch::Tensor images = torch::rand({2, 1, 28, 28});
  std::cout << "lenet: images " << images.sizes() << " -> logits " << lenet(images, init_params()).sizes() << "\n\n";
}

// "Data Synchronization", first half: every device gets a copy of the parameters, with gradients attached.
void copy_parameters() {
  const Params new_params = lockstep::get_params(init_params(), lockstep::try_gpu(0));
  std::cout << "b1 weight: " << new_params[1].view({1, -1}) << "\n";
  std::cout << "b1 grad: " << new_params[1].grad().view({1, -1}) << "\n\n";
}

// "Data Synchronization", second half: add the tensors of all devices, and give the sum to every device.
void add_over_devices() {
  const Devices devices = lockstep::try_gpus(2);
  Params data;
  for (int i = 0; i < 2; ++i) data.push_back(torch::ones({1, 2}, devices[i]) * (i + 1));
  std::cout << "before allreduce:\n" << data[0] << "\n" << data[1] << "\n";
  lockstep::allreduce(data);
  std::cout << "after allreduce:\n" << data[0] << "\n" << data[1] << "\n\n";
}

// "Data Distribution": a minibatch is cut into one part per device.
void distribute_data() {
  const torch::Tensor data = torch::arange(20).view({4, 5});
  const Devices devices = lockstep::try_gpus(2);
  const Params split = lockstep::split_and_load(data, devices);
  std::cout << "input:\n" << data << "\nload into " << lockstep::to_string(devices) << "\n";
  std::cout << "output:\n" << split[0] << "\n" << split[1] << "\n\n";
}

// "Training", first half: one minibatch on two devices. Afterwards both hold the same parameters.
void train_one_minibatch(const lockstep::ImageData& data) {
  const Devices devices = lockstep::try_gpus(2);
  std::vector<Params> device_params;
  for (const auto& device : devices) device_params.push_back(lockstep::get_params(init_params(), device));

  const auto all = lockstep::batches(data.train, {.size = 256});
  const lockstep::Batch batch = *all.begin();
  const double before = lockstep::train_batch(batch.x, batch.y, device_params, devices, /*lr=*/0.2, sum_of_losses);
  const double after = lockstep::train_batch(batch.x, batch.y, device_params, devices, /*lr=*/0.2, sum_of_losses);
  bool equal = true;
  for (size_t i = 0; i < device_params[0].size(); ++i) {
    equal = equal && device_params[0][i].cpu().equal(device_params[1][i].cpu());
  }
  std::printf("one minibatch: loss %.6f, after one update %.6f; the devices' parameters are %s\n\n", before, after,
              equal ? "equal" : "different");
}

double test_accuracy(const lockstep::Dataset& test, const Params& params, const c10::Device& device) {
  const torch::NoGradGuard no_grad;
  int64_t correct = 0;
  for (const auto& batch : lockstep::batches(test, {.size = 1000, .shuffle = false}, {.device = device})) {
    correct += (lenet(batch.x, params).argmax(1) == batch.y).sum().item<int64_t>();
  }
  return static_cast<double>(correct) / static_cast<double>(test.size());
}

// "Training", second half: all epochs, with the test accuracy after each, computed on device 0.
void train(int num_devices, int64_t batch_size, double lr, const lockstep::ImageData& data, int epochs) {
  std::printf("train(%d, %ld, %.1f)\n", num_devices, static_cast<long>(batch_size), lr);
  const Devices devices = lockstep::try_gpus(num_devices);
  std::vector<Params> device_params;
  for (const auto& device : devices) device_params.push_back(lockstep::get_params(init_params(), device));

  double accuracy = 0, seconds = 0;
  for (int epoch = 1; epoch <= epochs; ++epoch) {
    double loss = 0;
    const auto start = std::chrono::steady_clock::now();
    for (const auto& batch : lockstep::batches(data.train, {.size = batch_size, .epoch = epoch})) {
      loss += lockstep::train_batch(batch.x, batch.y, device_params, devices, lr, sum_of_losses) *
              static_cast<double>(batch.size());
    }
    for (const auto& device : devices) lockstep::synchronize(device);
    seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    accuracy = test_accuracy(data.test, device_params[0], devices[0]);
    std::printf("epoch %2d: train loss %.3f, test acc %.3f\n", epoch, loss / static_cast<double>(data.train.size()),
                accuracy);
    std::fflush(stdout);
  }
  std::printf("test acc: %.2f, %.1f sec/epoch on %s\n\n", accuracy, seconds / epochs,
              lockstep::to_string(devices).c_str());
}

}  // namespace

int main(int argc, char** argv) try {
  lockstep::keep_freed_memory();
  const int epochs = argc > 1 ? std::atoi(argv[1]) : 10;
  const lockstep::ImageData data = lockstep::load_fashion_mnist(argc > 2 ? argv[2] : "");

  a_toy_network();
  copy_parameters();
  add_over_devices();
  distribute_data();
  train_one_minibatch(data);
  train(/*num_devices=*/1, /*batch_size=*/256, /*lr=*/0.2, data, epochs);
  train(/*num_devices=*/2, /*batch_size=*/256, /*lr=*/0.2, data, epochs);
} catch (const lockstep::Error& error) {
  std::cerr << "error: " << error.what() << "\n";
  return 1;
}

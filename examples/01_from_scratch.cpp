// The section "Training on Multiple GPUs" (Dive into Deep Learning) from its first line to its last, with one thread
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
//   epoch  1: train loss 2.303, train acc 0.102, test acc 0.100, 61.7 sec
//   test acc: 0.10, 61.7 sec/epoch on [cpu]
//
//   train(2, 256, 0.2)
//   epoch  1: train loss 2.303, train acc 0.102, test acc 0.100, 59.7 sec
//   test acc: 0.10, 59.7 sec/epoch on [cpu, cpu]
#include <lockstep/lockstep.hpp>

#include <cstdio>
#include <cstdlib>
#include <iostream>

namespace {

using lockstep::Devices;
using Params = std::vector<torch::Tensor>;

// "A Toy Network": LeNet as a list of weights and a function. lockstep::lenet_params and lockstep::lenet are these two,
// spelled out in src/models.cpp.
void a_toy_network() {
  const Params params = lockstep::lenet_params(/*seed=*/0);
  const torch::Tensor images = torch::rand({2, 1, 28, 28});
  std::cout << "lenet: images " << images.sizes() << " -> logits " << lockstep::lenet(images, params).sizes() << "\n\n";
}

// "Data Synchronization", first half: every device gets a copy of the parameters, with gradients attached.
void copy_parameters() {
  const Params new_params = lockstep::get_params(lockstep::lenet_params(), lockstep::try_gpu(0));
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
  for (const auto& device : devices) device_params.push_back(lockstep::get_params(lockstep::lenet_params(), device));

  const lockstep::Batch batch = *lockstep::batches(data.train, {.size = 256}).begin();
  const double before = lockstep::train_batch(batch.x, batch.y, device_params, devices, /*lr=*/0.2);
  const double after = lockstep::train_batch(batch.x, batch.y, device_params, devices, /*lr=*/0.2);
  bool equal = true;
  for (size_t i = 0; i < device_params[0].size(); ++i) {
    equal = equal && device_params[0][i].cpu().equal(device_params[1][i].cpu());
  }
  std::printf("one minibatch: loss %.6f, after one update %.6f; the devices' parameters are %s\n\n", before, after,
              equal ? "equal" : "different");
}

// "Training", second half: all epochs, with the test accuracy after each, computed on device 0.
void train(int num_devices, int64_t batch_size, double lr, const lockstep::ImageData& data, int epochs) {
  std::printf("train(%d, %ld, %.1f)\n", num_devices, static_cast<long>(batch_size), lr);
  const auto print = [](const lockstep::EpochMetrics& epoch) {
    std::printf("epoch %2d: train loss %.3f, train acc %.3f, test acc %.3f, %.1f sec\n", epoch.epoch, epoch.train_loss,
                epoch.train_accuracy, epoch.test_accuracy, epoch.seconds);
    std::fflush(stdout);
  };
  const auto history = lockstep::train(num_devices, batch_size, lr, data, {.epochs = epochs, .on_epoch = print});

  double seconds = 0;
  for (const auto& epoch : history) seconds += epoch.seconds;
  std::printf("test acc: %.2f, %.1f sec/epoch on %s\n\n", history.back().test_accuracy,
              seconds / static_cast<double>(history.size()),
              lockstep::to_string(lockstep::try_gpus(num_devices)).c_str());
}

}  // namespace

int main(int argc, char** argv) try {
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

// lockstep: trains torch::nn::Modules over several devices, on LibTorch. This header is the core: one net, one
// optimizer, one loop, and what they need. docs/core.md has its names, one line each. These are its rooms, from the
// ground up:
//   base           errors, signals, the version
//   devices        what runs the tensors: CPU cores, GPUs, memory, precision
//   data           data sets, and the batches that each rank gets
//   optim          the learning rate, and groups of parameters
//   nn             weights in files, and dropout that does not depend on the ranks
//   ranks          run() and Rank: one thread per device, and what they say to each other
//   data_parallel  DataParallel and Optimizer: equal nets on all ranks, also shared out among them (ZeRO)
// Wings stand on the core, which knows none of them, and fit.hpp stands on all:
//   split.hpp      nets divided by layers and by channels, and plans for a cluster
//   models.hpp     LeNet, an MLP, AlexNet, ResNet-18 and a GPT, and layers that are fast on CPUs
//   lab.hpp        other ways to train: servers, local SGD, fewer bytes, Lars and Lamb, unequal devices
//   survive.hpp    jobs that go on when a process is killed
//   book.hpp       the functions of the book's section "Training on Multiple GPUs", on plain lists
//   fit.hpp        train() and fit(): whole runs, with folders, checkpoints and metrics
//   everything.hpp all of these
// Thread-safety and cost stand at the top of each header.
#pragma once

#include <torch/torch.h>
#include <lockstep/base/all.hpp>
#include <lockstep/data/all.hpp>
#include <lockstep/data_parallel/all.hpp>
#include <lockstep/devices/all.hpp>
#include <lockstep/nn/all.hpp>
#include <lockstep/optim/all.hpp>
#include <lockstep/ranks/all.hpp>

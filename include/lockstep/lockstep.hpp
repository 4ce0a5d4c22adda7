// lockstep: trains torch::nn::Modules over several devices, on LibTorch. Each room with public headers has one that
// describes each of its files in a line. From the ground up:
//   the ground, which knows no ranks
//     base            errors, texts and clocks. Includes no other room.
//     devices         what runs the tensors: CPU cores, GPUs, memory, precision.
//     data            data sets, batches, and the ranges into which they are cut.
//     layout          how a network may lie over ranks. Plain values.
//     plan            which layout is fastest on a cluster, by a model of costs. Knows neither ranks nor LibTorch.
//     optim           optimizers, their state and their learning rates.
//     models          networks, layers and their weights in files.
//   storey 1, the functions of the book's section "Training on Multiple GPUs" on plain lists
//     scratch         split_batch, allreduce, train_batch, with one entry per device.
//   storey 2, any torch::nn::Module on ranks
//     ranks           run() and Rank, and what all ways to divide work use.
//     data_parallel   one replica per rank, and how their gradients are averaged.
//     tensor_parallel layers split by channels.
//     pipeline        networks split by layers.
//     server          parameters kept by servers, pushed to and pulled from by workers.
//     survive         jobs that go on when a process is killed.
//     split           several of these ways at once, over a mesh of ranks.
//     profile         measures what a plan needs to know.
//   storey 3, what the program `lockstep` does
//     trainer         train(), and fit() for a network of your own; their options and runs.
// Thread-safety and cost stand at the top of each header.
#pragma once

#include <torch/torch.h>
#include <lockstep/base/all.hpp>
#include <lockstep/data/all.hpp>
#include <lockstep/data_parallel/all.hpp>
#include <lockstep/devices/all.hpp>
#include <lockstep/layout/all.hpp>
#include <lockstep/models/all.hpp>
#include <lockstep/optim/all.hpp>
#include <lockstep/pipeline/all.hpp>
#include <lockstep/plan/all.hpp>
#include <lockstep/profile/all.hpp>
#include <lockstep/ranks/all.hpp>
#include <lockstep/scratch/all.hpp>
#include <lockstep/server/all.hpp>
#include <lockstep/split/all.hpp>
#include <lockstep/survive/all.hpp>
#include <lockstep/tensor_parallel/all.hpp>
#include <lockstep/trainer/all.hpp>

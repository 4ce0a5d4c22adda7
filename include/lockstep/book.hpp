// book has the functions of the section "Training on Multiple GPUs" of Dive into Deep Learning, on plain lists of
// tensors with one entry per device. It is a wing: component book, target lockstep::book.
//   scratch/allreduce       the sum of one tensor per device, on every device
//   scratch/on_each_device  one worker per device, all at the same time
//   scratch/split_batch     a batch cut into parts, one on each device
//   scratch/train_batch     get_params and train_batch: the section's heart
//   scratch/try_gpu         finds a GPU, or takes the CPU
#pragma once

#include <lockstep/scratch/allreduce.hpp>
#include <lockstep/scratch/on_each_device.hpp>
#include <lockstep/scratch/split_batch.hpp>
#include <lockstep/scratch/train_batch.hpp>
#include <lockstep/scratch/try_gpu.hpp>

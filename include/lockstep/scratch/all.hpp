// scratch: the section's functions on plain lists of tensors, one entry per device. It is storey 1.
//   allreduce       the sum of one tensor per device, on every device
//   on_each_device  one worker per device, all at the same time
//   split_batch     a batch cut into parts, one on each device
//   train_batch     get_params and train_batch: the section's heart
#pragma once

#include <lockstep/scratch/allreduce.hpp>
#include <lockstep/scratch/on_each_device.hpp>
#include <lockstep/scratch/split_batch.hpp>
#include <lockstep/scratch/train_batch.hpp>

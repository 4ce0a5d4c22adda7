// lockstep: training torch::nn::Modules over several devices. This header only includes; each idea has one of its own.
#pragma once

#include <torch/torch.h>
#include <lockstep/allreduce.hpp>
#include <lockstep/checkpoint.hpp>
#include <lockstep/data.hpp>
#include <lockstep/data_parallel.hpp>
#include <lockstep/devices.hpp>
#include <lockstep/error.hpp>
#include <lockstep/evaluate.hpp>
#include <lockstep/fetch_data.hpp>
#include <lockstep/metrics.hpp>
#include <lockstep/models.hpp>
#include <lockstep/on_each_device.hpp>
#include <lockstep/rank.hpp>
#include <lockstep/split.hpp>
#include <lockstep/train_batch.hpp>
#include <lockstep/trainer.hpp>

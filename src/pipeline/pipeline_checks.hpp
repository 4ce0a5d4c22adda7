// These functions check for what a Pipeline refuses.
#pragma once

#include <torch/nn/modules/container/sequential.h>
#include <lockstep/layout/model_split.hpp>
#include <lockstep/ranks/rank.hpp>

#include "pipeline_shapes.hpp"

#include <cstdint>
#include <string>

namespace lockstep {

// Throws Error for a SyncBatchNorm in the stage.
void check_stage(const torch::nn::SequentialImpl& layers, int stage);

// Throws Error, which begins with "SplitModel", if a layer of LibTorch's draws random numbers when it trains. Layers of
// a user's own are not checked.
void check_recomputable(const torch::nn::Sequential& net);

// Call these three on all ranks. They throw Error on every rank if two ranks differ. Not every input is compared: see
// rank_with_another_input.
void compare_splits(Rank& rank, const ModelSplit& split);
void compare_batches(Rank& rank, const std::string& shape, int64_t size);
void compare_inputs(Rank& rank, const at::Tensor& x, int64_t inputs);

// Throws Error if this rank's Batch::mark is not the last rank's. A mark of 0 is unknown, and fits any.
void check_mark(const Rank& rank, int32_t mark, int32_t of_last);

// Throws Error if a stage's output is not of the shape that zeros had.
void check_output(int stage, const at::Tensor& y, const SampleShape& expected);

// Throws Error if a stage's output shares memory with a larger tensor. After a cut the output would have memory of its
// own, and some kernels round by where and how an input lies.
void check_memory(int stage, const at::Tensor& y, const SampleShape& expected);

}  // namespace lockstep

// data: data sets, batches, and the parts into which they are cut.
//   data             image sets as tensors, and the batches that a rank gets of them
//   samples          tensors, or a function that reads, of which batches are made; and their order
//   sample_files     data that are larger than memory
//   sample_function  a loss or a metric, of (y_hat, y) or of (y_hat, batch)
//   torch_dataset    a dataset of LibTorch's torch::data as Samples
// Not in lockstep.hpp:
//   fetch_data       downloads Fashion-MNIST where no package provides it (component data)
#pragma once

#include <lockstep/data/data.hpp>
#include <lockstep/data/sample_files.hpp>
#include <lockstep/data/sample_function.hpp>
#include <lockstep/data/samples.hpp>
#include <lockstep/data/torch_dataset.hpp>

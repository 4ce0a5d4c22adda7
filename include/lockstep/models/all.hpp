// models: networks, layers and their weights in files.
//   conv_relu_pool  convolution, ReLU and pooling as one fast operator
//   dropout         dropout with the same masks on any number of ranks
//   gpt             a language model of transformer blocks
//   linear          a linear layer, with the faster of LibTorch's and oneDNN's kernels
//   models          LeNet, an MLP, AlexNet, ResNet-18
//   residual_block  the blocks of ResNet-18
//   sample_scope    tells layers which samples this thread computes
//   tied_linear     a linear layer with the weight of another layer
//   weights         a module's weights, or any tensors, as a safetensors file
//
// How it works: conv_relu_pool is one operator for convolution, ReLU and pooling; its kernels lie in src/models/kernels
// (docs/decisions/0007). lenet.cpp has the same network with the kernels and without. Dropout chooses the values to
// drop by the samples' places in the global batch. A SampleScope tells it these places.
#pragma once

#include <lockstep/models/conv_relu_pool.hpp>
#include <lockstep/models/dropout.hpp>
#include <lockstep/models/gpt.hpp>
#include <lockstep/models/linear.hpp>
#include <lockstep/models/models.hpp>
#include <lockstep/models/residual_block.hpp>
#include <lockstep/models/sample_scope.hpp>
#include <lockstep/models/tied_linear.hpp>
#include <lockstep/models/weights.hpp>

// models has nets, and layers that are faster than LibTorch's. It is a wing: component models, target
// lockstep::models.
//   models/conv_relu_pool  convolution, ReLU and pooling as one fast operator
//   models/fast_kernels    lockstep's kernels for nets of LibTorch's own layers
//   models/fuse_layers     faster layers in the place of LibTorch's for a net of LibTorch's layers
//   models/gpt             a language model of transformer blocks
//   models/linear          a linear layer, with the fastest of LibTorch's, oneDNN's and lockstep's kernels
//   models/models          LeNet, an MLP, AlexNet, ResNet-18
//   models/residual_block  the blocks of ResNet-18
//   models/text            the bytes of a file, for a language model
//   models/tied_linear     a linear layer with the weight of another layer
// src/models/README.md says how it works.
#pragma once

#include <lockstep/models/conv_relu_pool.hpp>
#include <lockstep/models/fast_kernels.hpp>
#include <lockstep/models/fuse_layers.hpp>
#include <lockstep/models/gpt.hpp>
#include <lockstep/models/linear.hpp>
#include <lockstep/models/models.hpp>
#include <lockstep/models/residual_block.hpp>
#include <lockstep/models/text.hpp>
#include <lockstep/models/tied_linear.hpp>

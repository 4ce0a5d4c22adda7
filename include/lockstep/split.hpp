// split divides nets among ranks by layers, by channels, or both, and makes plans that say how. It is a wing: component
// split, target lockstep::split.
//   layout/model_split                    the shape of a mesh of ranks, and the split of a net over the mesh
//   layout/pipeline_schedule              the order of the forwards and backwards of a rank's stages
//   plan/cluster                          devices and the links between them
//   plan/model_profile                    the costs of each layer of a net
//   plan/plan                             the best way to split a net, and the predicted cost
//   profile/layer_profile                 measures a net's layers, the ranks' speeds and the links between ranks
//   split/mesh                            ranks as a block of three axes
//   split/split_model                     SplitModel: data, layers and channels at once
//   tensor_parallel/parallel_layers       Shardable, and layers of which each rank keeps a slice
//   tensor_parallel/parallel_transformer  LayerNorm, Embedding and MultiheadAttention in slices
// src/split/README.md says how it works.
#pragma once

#include <lockstep/layout/model_split.hpp>
#include <lockstep/layout/pipeline_schedule.hpp>
#include <lockstep/plan/cluster.hpp>
#include <lockstep/plan/model_profile.hpp>
#include <lockstep/plan/plan.hpp>
#include <lockstep/profile/layer_profile.hpp>
#include <lockstep/split/mesh.hpp>
#include <lockstep/split/split_model.hpp>
#include <lockstep/tensor_parallel/parallel_layers.hpp>
#include <lockstep/tensor_parallel/parallel_transformer.hpp>

// split: several of these ways at once, over a mesh of ranks.
//   mesh         ranks as a block of three axes
//   split_model  SplitModel: data, layers and channels at once
//
// How it works. SplitModel cuts a Sequential into the stages of a Pipeline, splits each stage's layers by channels, and
// averages gradients along the mesh's data axis. Every axis is a group of ranks (docs/decisions/0009).
#pragma once

#include <lockstep/split/mesh.hpp>
#include <lockstep/split/split_model.hpp>

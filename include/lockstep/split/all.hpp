// split: several of these ways at once, over a mesh of ranks.
//   clip_grad_norm        one norm over all parameters, wherever these lie
//   has_finite_gradients  may a step be taken?
//   mesh                  ranks as a block of three axes
//   split_checkpoint      the optimizers' state, for any other split
//   split_model           SplitModel: data, layers and channels at once
//
// How it works. SplitModel cuts a Sequential into the stages of a Pipeline, splits each stage's layers by channels, and
// averages gradients along the mesh's data axis. Every axis is a group of ranks (docs/decisions/0009).
#pragma once

#include <lockstep/split/clip_grad_norm.hpp>
#include <lockstep/split/has_finite_gradients.hpp>
#include <lockstep/split/mesh.hpp>
#include <lockstep/split/split_checkpoint.hpp>
#include <lockstep/split/split_model.hpp>

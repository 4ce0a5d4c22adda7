// split: several of these ways at once, over a mesh of ranks.
//   clip_grad_norm  one norm over all parameters, wherever these lie
//   mesh            ranks as a block of three axes
//   split_model     SplitModel: data, layers and channels at once
#pragma once

#include <lockstep/split/clip_grad_norm.hpp>
#include <lockstep/split/mesh.hpp>
#include <lockstep/split/split_model.hpp>

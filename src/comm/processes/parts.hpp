// Compares the parts of an alltoall between processes through the store, before anything moves. Otherwise Gloo would
// end a process that gets a part of an unexpected size.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <string>
#include <vector>

namespace lockstep::comm {

// Leaves under `key` + `rank` what the rank sends to each rank (`inputs`) and expects of each (`outputs`). Compares it
// with what others have left under `key`. The later of two ranks sees the other's parts, so at least one throws Error
// before both have begun. Gives the key that the rank left. Delete it once the rank has all parts: then all have
// compared.
std::string compare_parts(c10d::Store& store, const std::string& key, int rank, const std::vector<at::Tensor>& inputs,
                          const std::vector<at::Tensor>& outputs);

}  // namespace lockstep::comm

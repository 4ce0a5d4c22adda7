// LayerHolder: lets convert_sync_batchnorm() replace a module's BatchNorms, as it replaces those of a
// torch::nn::Sequential.
//
// Derive a module of your own from LayerHolder, beside torch::nn::Module, if it keeps BatchNorms in members of the type
// torch::nn::AnyModule. lockstep.hpp does not include it.
#pragma once

#include <torch/nn/modules/container/any.h>

#include <string>

namespace lockstep {

class LayerHolder {
 public:
  virtual ~LayerHolder() = default;

  // Gives the member that holds the layer of this name, as register_module() got it.
  virtual torch::nn::AnyModule& layer(const std::string& name) = 0;
};

}  // namespace lockstep

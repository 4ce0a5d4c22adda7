#include "random_layers.hpp"

#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/rnn.h>
#include <lockstep/nn/dropout.hpp>

namespace lockstep {
namespace {

template <class... Modules>
bool drops_out(const torch::nn::Module& module) {
  const auto one = [&](const auto* layer) {
    if constexpr (requires { layer->options.p(); })
      return layer != nullptr && layer->options.p() > 0;
    else
      return layer != nullptr && layer->options.dropout() > 0;
  };
  return (one(dynamic_cast<const Modules*>(&module)) || ...);
}

}  // namespace

std::string first_random_layer(const torch::nn::Module& module) {
  namespace nn = torch::nn;
  for (const auto& item : module.named_modules()) {
    const nn::Module& layer = *item.value();
    if (drops_out<nn::DropoutImpl, nn::Dropout2dImpl, nn::Dropout3dImpl, nn::AlphaDropoutImpl,
                  nn::FeatureAlphaDropoutImpl, nn::RNNImpl, nn::LSTMImpl, nn::GRUImpl, nn::MultiheadAttentionImpl>(
            layer) ||
        dynamic_cast<const nn::RReLUImpl*>(&layer) != nullptr) {
      return item.key();
    }
  }
  return "";
}

void name_dropouts(torch::nn::Module& module) {
  for (const auto& item : module.named_modules()) {
    if (auto* const dropout = dynamic_cast<DropoutImpl*>(item.value().get())) dropout->set_name(item.key());
  }
}

}  // namespace lockstep

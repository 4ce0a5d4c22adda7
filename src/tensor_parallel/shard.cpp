#include "shard.hpp"

#include <c10/core/GradMode.h>
#include <c10/util/Type.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/common.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/modules/pooling.h>
#include <torch/nn/modules/upsampling.h>
#include <lockstep/base/error.hpp>
#include <lockstep/models/linear.hpp>
#include <lockstep/nn/dropout.hpp>
#include <lockstep/tensor_parallel/parallel_transformer.hpp>

#include "layer_slices.hpp"
#include "sharded_blocks.hpp"

#include <cstddef>
#include <memory>
#include <optional>
#include <typeinfo>
#include <utility>

namespace lockstep {
namespace {

using torch::nn::AnyModule;
using torch::nn::Module;

// Accepts only these types themselves, since a derived type may compute something else.
template <class... Types>
bool is_one_of(const Module& module) {
  return ((typeid(module) == typeid(Types)) || ...);
}

template <class Type>
std::shared_ptr<Type> as(const AnyModule& layer) {
  const auto module = layer.ptr();
  return is_one_of<Type>(*module) ? std::static_pointer_cast<Type>(module) : nullptr;
}

bool works_value_by_value(const Module& module) {
  using namespace torch::nn;
  return is_one_of<ReLUImpl, ReLU6Impl, LeakyReLUImpl, ELUImpl, SELUImpl, CELUImpl, GELUImpl, SiLUImpl, MishImpl,
                   SigmoidImpl, LogSigmoidImpl, TanhImpl, TanhshrinkImpl, HardtanhImpl, HardshrinkImpl, SoftplusImpl,
                   SoftshrinkImpl, SoftsignImpl, ThresholdImpl, IdentityImpl>(module);
}

bool works_channel_by_channel(const Module& module) {  // these layers take images
  using namespace torch::nn;
  return is_one_of<MaxPool2dImpl, AvgPool2dImpl, LPPool2dImpl, AdaptiveMaxPool2dImpl, AdaptiveAvgPool2dImpl,
                   UpsampleImpl>(module);
}

// Takes over which parameters are frozen, and the mode, which clone() leaves out.
void take_over_flags(const Module& from, Module& to) {
  auto parameters = to.named_parameters();
  for (const auto& item : from.named_parameters()) {
    parameters[item.key()].requires_grad_(item.value().requires_grad());
  }
  to.train(from.is_training());
}

constexpr int64_t kChannels = 1;
constexpr int64_t kFeatures = -1;
constexpr int64_t kSamples = 0;  // the dimension of samples, which is never split

// Goes through a net's layers from the first to the last, and knows each layer's input.
class Sharder {
 public:
  Sharder(Rank& rank, TensorRule rule) : rank_(rank), alternate_(rule == TensorRule::alternating) {}

  // Makes this rank's slice of the layer `name`.
  AnyModule slice_of_layer(const std::string& name, const AnyModule& layer) {
    const auto module = layer.ptr();
    if (const auto linear = as<torch::nn::LinearImpl>(layer)) return slice_of_linear(linear);
    if (const auto linear = as<FastLinearImpl>(layer)) return slice_of_linear(linear);
    if (const auto conv = as<torch::nn::Conv2dImpl>(layer)) return slice_of_conv(conv);
    if (const auto conv = as<ConvReluPoolImpl>(layer)) return slice_of_conv_relu_pool(conv);
    if (const auto words = as<torch::nn::EmbeddingImpl>(layer)) return slice_of_embedding(words);
    if (const auto* own = dynamic_cast<const Shardable*>(module.get())) return computed_whole(own->shard(rank_));
    if (const auto block = as<ResidualBlockImpl>(layer)) {
      return computed_whole(AnyModule(std::make_shared<ShardedResidualBlock>(*block, rank_)));
    }
    if (const auto words = as<GptEmbeddingImpl>(layer)) {
      return computed_whole(AnyModule(std::make_shared<ShardedGptEmbedding>(*words, rank_)));
    }
    if (const auto block = as<GptBlockImpl>(layer)) {
      return computed_whole(AnyModule(std::make_shared<ShardedGptBlock>(*block, rank_)));
    }
    if (const auto norm = as<torch::nn::BatchNorm1dImpl>(layer)) {
      return slice_of_norm<ParallelBatchNorm1d>(norm, layer, holds_features(norm->options.num_features()));
    }
    if (const auto norm = as<torch::nn::BatchNorm2dImpl>(layer)) {
      return slice_of_norm<ParallelBatchNorm2d>(norm, layer, held_.dim == kChannels);
    }
    if (const auto norm = as<torch::nn::GroupNormImpl>(layer)) {
      // If groups lie across slices, ranks would need the others' sums.
      const bool has_whole_groups = norm->options.num_groups() % rank_.world_size() == 0;
      return slice_of_norm<ParallelGroupNorm>(norm, layer, held_.dim == kChannels && has_whole_groups);
    }
    if (const auto norm = as<torch::nn::LayerNormImpl>(layer)) {
      const auto& shape = norm->options.normalized_shape();
      return slice_of_norm<ParallelLayerNorm>(norm, layer, shape.size() == 1 && holds_features(shape[0]));
    }
    if (const auto attention = as<torch::nn::MultiheadAttentionImpl>(layer)) return slice_of_attention(attention);
    if (is_one_of<DropoutImpl, torch::nn::DropoutImpl, torch::nn::Dropout2dImpl>(*module))
      return slice_of_dropout(name, layer);
    if (const auto flatten = as<torch::nn::FlattenImpl>(layer)) return slice_of_flatten(*flatten, layer);
    if (works_value_by_value(*module)) return clone(layer);
    if (works_channel_by_channel(*module)) return at_hand_in(kChannels) ? clone(layer) : computed_whole(clone(layer));
    const torch::nn::Module& unknown = *module;
    throw Error("how to split a " + c10::demangle(typeid(unknown).name()) +
                " is not known. Derive it from lockstep::Shardable" + kOrKeepWhole);
  }

  // Makes this rank's slice of a layer that is tied to a parameter of an earlier one; `how` says how that one is split.
  AnyModule slice_of_tied(const TiedLinearImpl& whole, const std::optional<SlicedDimension>& how) {
    const Activation input = std::exchange(held_, {});
    return AnyModule(
        std::make_shared<ShardedTiedLinear>(whole, input, how, /*outputs=*/whole.tied_weight().size(0), rank_));
  }

  // Ends the net with `layer`, whose result is gathered if it is in slices.
  AnyModule with_whole_result(AnyModule layer) {
    if (!held_.in_slices) return layer;
    const Activation output = std::exchange(held_, {});
    return AnyModule(Gathered(std::move(layer), Activation{}, output, rank_));
  }

 private:
  // Tells whether the layer can use the input as it is: whole, or in slices along `dim`.
  bool at_hand_in(int64_t dim) const { return !held_.in_slices || held_.dim == dim; }

  // Computes `layer` whole: it takes whole inputs and gives whole results.
  AnyModule computed_whole(AnyModule layer) {
    if (!held_.in_slices) return layer;
    const Activation input = std::exchange(held_, {});
    return AnyModule(Gathered(std::move(layer), input, Activation{}, rank_));
  }

  // Layers with weights take slices along `dim` only. Other slices are gathered first.
  template <class Make>
  AnyModule on_slices_along(int64_t dim, const Make& make) {
    const Activation other = at_hand_in(dim) ? Activation{} : std::exchange(held_, {});
    auto layer = make();
    return other.in_slices ? AnyModule(Gathered(std::move(layer), other, Activation{}, rank_)) : std::move(layer);
  }

  AnyModule slice_of_linear(const std::shared_ptr<torch::nn::LinearImpl>& whole) {
    return on_slices_along(kFeatures, [&] {
      if (std::exchange(held_, {}).in_slices) return AnyModule(RowParallelLinear(whole, rank_));
      held_ = {.in_slices = true, .dim = kFeatures, .total = whole->weight.size(0)};
      return AnyModule(ColumnParallelLinear(whole, rank_));
    });
  }

  AnyModule slice_of_conv(const std::shared_ptr<torch::nn::Conv2dImpl>& whole) {
    return on_slices_along(kChannels, [&] {
      const bool in_slices = std::exchange(held_, {}).in_slices;
      if (alternate_ && in_slices && whole->options.groups() == 1) {
        return AnyModule(InputChannelParallelConv2d(whole, rank_));
      }
      held_ = {.in_slices = true, .dim = kChannels, .total = whole->options.out_channels()};
      return AnyModule(OutputChannelParallelConv2d(whole, rank_, in_slices));
    });
  }

  AnyModule slice_of_conv_relu_pool(const std::shared_ptr<ConvReluPoolImpl>& whole) {
    return on_slices_along(kChannels, [&] {
      const bool in_slices = held_.in_slices;
      held_ = {.in_slices = true, .dim = kChannels, .total = whole->weight.size(0)};
      return AnyModule(OutputChannelParallelConvReluPool(whole, rank_, in_slices));
    });
  }

  // Tells whether an input in slices has `count` features in all.
  bool holds_features(int64_t count) const {
    return held_.dim == kFeatures && (held_.total == 0 || held_.total == count);
  }

  // Makes this rank's slice of a norm. `fits` tells whether slices of the input are enough; if not, they are gathered.
  template <class Parallel, class Norm>
  AnyModule slice_of_norm(const std::shared_ptr<Norm>& whole, const AnyModule& layer, bool fits) {
    return held_.in_slices && fits ? AnyModule(Parallel(whole, rank_)) : computed_whole(clone(layer));
  }

  AnyModule slice_of_embedding(const std::shared_ptr<torch::nn::EmbeddingImpl>& whole) {
    return on_slices_along(kSamples, [&] {
      held_ = {.in_slices = true, .dim = kFeatures, .total = whole->options.embedding_dim()};
      return AnyModule(ParallelEmbedding(whole, rank_));
    });
  }

  AnyModule slice_of_attention(const std::shared_ptr<torch::nn::MultiheadAttentionImpl>& whole) {
    if (!held_.in_slices) return AnyModule(ParallelMultiheadAttention(whole, rank_));
    throw Error(
        "an attention takes three inputs, so that it can only be a net's first layer, or slices of a block of " +
        std::string("your own"));
  }

  // Makes a Dropout of lockstep's in any case, since LibTorch's would drop other values on each rank.
  AnyModule slice_of_dropout(const std::string& name, const AnyModule& layer) const {
    DropoutImpl::Options options;
    if (const auto own = as<DropoutImpl>(layer)) options = own->options;
    if (const auto values = as<torch::nn::DropoutImpl>(layer)) options.p = values->options.p();
    if (const auto channels = as<torch::nn::Dropout2dImpl>(layer)) {
      options = {.p = channels->options.p(), .whole_channels = true};
    }
    if (held_.in_slices) options.slice = {held_.dim, held_.total, rank_.index(), rank_.world_size()};
    Dropout dropout(options);
    dropout->set_name(name);
    dropout->train(layer.ptr()->is_training());
    return AnyModule(dropout);
  }

  // Flatten puts channels in a row, with a feature for each pixel. So slices of channels become slices of features.
  AnyModule slice_of_flatten(const torch::nn::FlattenImpl& flatten, const AnyModule& layer) {
    const bool to_features = flatten.options.start_dim() == 1 && flatten.options.end_dim() == -1;
    if (!held_.in_slices || held_.dim != kChannels || !to_features) return computed_whole(clone(layer));
    held_ = {.in_slices = true, .dim = kFeatures, .total = 0};
    return clone(layer);
  }

  AnyModule cloned(const AnyModule& layer) const {
    try {
      return layer.clone(rank_.device());
    } catch (const c10::Error& error) {
      const torch::nn::Module& module = *layer.ptr();
      throw Error("a " + c10::demangle(typeid(module).name()) +
                  " cannot be cloned, which it must be to be kept whole; derive it from torch::nn::Cloneable. " +
                  error.what_without_backtrace());
    }
  }

  AnyModule clone(const AnyModule& layer) const {
    const c10::AutoGradMode no_grad(false);
    AnyModule copy = cloned(layer);
    take_over_flags(*layer.ptr(), *copy.ptr());
    return copy;
  }

  Rank rank_;
  const bool alternate_;  // whether convolutions alternate
  Activation held_;       // the activation that the next layer gets
};

// Slicing one layer twice would make two layers, each with half of its gradient.
void check_that_no_weights_are_shared(const torch::nn::Sequential& net) {
  std::map<const Module*, std::string> names;
  for (const auto& item : net->named_children()) {
    if (item.value()->parameters().empty()) continue;
    const auto [before, is_new] = names.emplace(item.value().get(), item.key());
    if (is_new) continue;
    throw Error("shard: layer " + item.key() + " is layer " + before->second +
                " once more; layers that share their weights cannot be split. Put both into one Shardable module");
  }
}

// Tells how this rank's net splits a parameter; none: the parameter is whole.
std::optional<SlicedDimension> dimension_of(const torch::nn::Sequential& slices, const std::string& parameter) {
  const auto dimensions = sliced_dimensions_of(slices);
  const auto found = dimensions.find(parameter);
  return found == dimensions.end() ? std::nullopt : std::optional(found->second);
}

}  // namespace

std::shared_ptr<Module> whole_copy(const Module& layer, const Rank& rank) {
  const c10::AutoGradMode no_grad(false);
  auto copy = layer.clone(rank.device());
  take_over_flags(layer, *copy);
  return copy;
}

torch::nn::Sequential shard(const torch::nn::Sequential& net, Rank& rank, TensorRule rule) {
  if (net.is_empty() || net->is_empty()) throw Error("shard: the net has no layers");
  check_that_no_weights_are_shared(net);
  Sharder sharder(rank, rule);
  torch::nn::Sequential slices;
  size_t index = 0;
  for (const auto& item : net->named_children()) {
    const AnyModule& layer = *(net->begin() + static_cast<std::ptrdiff_t>(index++));
    const auto tied = as<TiedLinearImpl>(layer);
    try {
      if (tied && !slices->named_parameters().contains(tied->tied_to())) {
        throw Error("it is tied to " + tied->tied_to() + ", which is no parameter of a layer before it");
      }
      AnyModule mine = tied ? sharder.slice_of_tied(*tied, dimension_of(slices, tied->tied_to()))
                            : sharder.slice_of_layer(item.key(), layer);
      if (index == net->size()) mine = sharder.with_whole_result(std::move(mine));
      slices->push_back(item.key(), std::move(mine));
    } catch (const Error& error) {
      throw Error("shard: layer " + item.key() + ": " + error.what(), error.data());
    }
  }
  slices->train(net->is_training());
  tie_layers(*slices);
  rank.barrier();  // clones draw from a generator that ranks may share; later draws must come after all of them
  return slices;
}

}  // namespace lockstep

#include "grain_statistics.hpp"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/instancenorm.h>
#include <lockstep/base/error.hpp>

#include "base/classic.hpp"
#include "running_statistics_names.hpp"

#include <algorithm>
#include <optional>
#include <string>
#include <type_traits>
#include <unordered_set>

namespace lockstep {
namespace {

using at::Tensor;
namespace nn = torch::nn;

// Says how a layer's statistics follow its inputs.
struct Following {
  std::optional<double> momentum;  // if empty, statistics are the mean over all batches so far
  bool counts_batches = true;
};

template <class Layer, class... Others>
std::optional<Following> following_of(const nn::Module& module) {
  if (const auto* layer = dynamic_cast<const Layer*>(&module)) {
    return Following{layer->options.momentum(), std::is_same_v<decltype(layer->options), nn::BatchNormOptions>};
  }
  if constexpr (sizeof...(Others) > 0) return following_of<Others...>(module);
  return std::nullopt;
}

std::optional<Following> following(const nn::Module& module) {
  return following_of<nn::BatchNorm1dImpl, nn::BatchNorm2dImpl, nn::BatchNorm3dImpl, nn::InstanceNorm1dImpl,
                      nn::InstanceNorm2dImpl, nn::InstanceNorm3dImpl>(module);
}

// Repeats each column of `columns` for all values of its layer. `counts` are the layers' numbers of values.
Tensor spread_over_values(const Tensor& columns, const std::vector<int64_t>& counts) {
  std::vector<Tensor> parts;
  for (size_t i = 0; i < counts.size(); ++i) {
    parts.push_back(columns.narrow(1, static_cast<int64_t>(i), 1).expand({columns.size(0), counts[i]}));
  }
  return at::cat(parts, 1);
}

}  // namespace

GrainStatistics::GrainStatistics(const nn::Module& module, const Rank& rank) : rank_(rank) {
  std::unordered_set<const nn::Module*> seen;  // a module may have several names
  module.apply([&](const std::string& name, const nn::Module& layer) {
    const auto buffers = layer.named_buffers(/*recurse=*/false);
    const Tensor* mean = buffers.find("running_mean");
    const Tensor* variance = buffers.find("running_var");
    const Tensor* batches = buffers.find("num_batches_tracked");
    const auto keys = buffers.keys();
    if (std::none_of(keys.begin(), keys.end(), is_running_statistic) || !seen.insert(&layer).second) return;
    const auto known = following(layer);
    if (!known || mean == nullptr || variance == nullptr || batches == nullptr) {
      throw Error(rank_.name() + ": grains: the layer '" + name + "', " + layer.name() +
                  ", has running statistics, and how it changes them is not known, so they would not be the same on "
                  "any number of ranks. Use LibTorch's BatchNorm or InstanceNorm there, or no grains. A buffer that is "
                  "no running "
                  "statistic needs another name than running_mean, running_var and num_batches_tracked");
    }
    layers_.push_back({&layer, *mean, *variance, *batches, known->counts_batches});
  });
}

// ---- The forward of a grain.

void GrainStatistics::forward(int64_t number, const std::function<void()>& compute) {
  if (open_) {
    throw Error(rank_.name() + ": grains: the forward of grain " + std::to_string(number) +
                " begins within another grain's; end that first");
  }
  std::vector<Note> notes(layers_.size());
  const std::vector<Layer> saved = replace(notes);
  try {
    compute();
  } catch (const c10::Error& error) {
    put_back(saved, notes);
    if (error.msg().find("Expected more than 1 value per channel") != std::string::npos) refuse_one_sample(number);
    throw;
  } catch (...) {
    put_back(saved, notes);
    throw;
  }
  put_back(saved, notes);
  auto& kept = notes_[number];
  kept.resize(notes.size());
  for (size_t i = 0; i < notes.size(); ++i) {
    if (kept[i].forwards == 0) kept[i] = notes[i];
  }
}

// The layers get other memory in place of their statistics. Statistics that begin at zero become, after any number of
// forwards, the values that the forwards add. Autograd has noted the buffers and must not see them change; set_data
// keeps their versions.
std::vector<GrainStatistics::Layer> GrainStatistics::replace(std::vector<Note>& notes) {
  const c10::NoGradGuard no_grad;
  std::vector<Layer> saved(layers_.size());
  std::vector<Tensor> batches(layers_.size());  // allocated with the others, so that a failure leaves all layers whole
  for (size_t i = 0; i < saved.size(); ++i) {
    const Layer& layer = layers_[i];
    if (!layer.module->is_training()) continue;
    notes[i].mean = at::zeros_like(layer.mean);
    notes[i].variance = at::zeros_like(layer.variance);
    batches[i] = at::zeros_like(layer.batches);
    // Each forward makes one change of this buffer, which the host can count without waiting for a GPU.
    notes[i].forwards = -(layer.counts_batches ? layer.batches : layer.mean)._version();
    saved[i] = {layer.module, layer.mean.variable_data(), layer.variance.variable_data(),
                layer.batches.variable_data()};
  }
  for (size_t i = 0; i < saved.size(); ++i) {
    if (saved[i].module == nullptr) continue;
    layers_[i].mean.set_data(notes[i].mean);
    layers_[i].variance.set_data(notes[i].variance);
    layers_[i].batches.set_data(batches[i]);
  }
  open_ = true;
  return saved;
}

void GrainStatistics::put_back(const std::vector<Layer>& saved, std::vector<Note>& notes) {
  for (size_t i = 0; i < saved.size(); ++i) {
    if (saved[i].module == nullptr) continue;
    const Layer& layer = layers_[i];
    layer.mean.set_data(saved[i].mean);
    layer.variance.set_data(saved[i].variance);
    layer.batches.set_data(saved[i].batches);
    notes[i].forwards += (layer.counts_batches ? layer.batches : layer.mean)._version();
    const double momentum = following(*layer.module)->momentum.value_or(0);
    for (int64_t forward = 0; forward < notes[i].forwards; ++forward) notes[i].kept *= 1 - momentum;
  }
  open_ = false;
}

void GrainStatistics::refuse_one_sample(int64_t number) const {
  throw Error(
      rank_.name() + ": grains: grain " + std::to_string(number) +
      " has one sample, of which a BatchNorm gets one value per channel, and that has no variance. It is of " +
      "a batch of " + std::to_string(samples_) + " samples in grains of " + std::to_string(grain_) +
      ". Take another batch size or grain, so that no grain has one sample. If it is an epoch's last batch, leave it "
      "out: BatchOptions::drop_last, in a run `drop_last`");
}

// ---- What all ranks make of it.

// Computes in float64 and by elementwise multiplications and additions, so that no bit depends on how memory is laid
// out.
void GrainStatistics::finish(const std::vector<int64_t>& runs) {
  if (layers_.empty()) return;
  const c10::NoGradGuard no_grad;
  check_grains(runs);
  if (runs.front() == runs.back()) return;
  const auto range_of = [&](int rank) { return Range{runs[rank], runs[rank + 1]}; };
  Tensor table = own_table(range_of(rank_.index()));
  notes_.clear();
  if (rank_.world_size() > 1) {
    int64_t most = 0;
    for (int rank = 0; rank < rank_.world_size(); ++rank) most = std::max(most, range_of(rank).size());
    const Tensor padded = at::zeros({most, table.size(1)}, table.options());
    padded.narrow(0, 0, table.size(0)).copy_(table);
    const Tensor all = rank_.allgather(padded);
    std::vector<Tensor> tables;
    for (int rank = 0; rank < rank_.world_size(); ++rank) {
      tables.push_back(all[rank].narrow(0, 0, range_of(rank).size()));
    }
    table = at::cat(tables);
  }
  apply(table);
}

void GrainStatistics::check_grains(const std::vector<int64_t>& runs) const {
  const auto ranks = static_cast<size_t>(rank_.world_size());
  if (runs.size() != ranks + 1 || !std::is_sorted(runs.begin(), runs.end())) {
    throw Error(rank_.name() + ": grains: " + std::to_string(ranks) + " ranks need " + std::to_string(ranks + 1) +
                " ascending bounds of their ranges of grains; these are " + classic_text(c10::IntArrayRef(runs)));
  }
  const Range own{runs[rank_.index()], runs[rank_.index() + 1]};
  for (const auto& [number, notes] : notes_) {
    if (number >= own.begin && number < own.end) continue;
    throw Error(rank_.name() + ": grains: grain " + std::to_string(number) +
                " was computed here, but this rank's grains go from " + std::to_string(own.begin) + " up to " +
                std::to_string(own.end) + ". Compute the samples that batches() gives this rank");
  }
}

// Gives float64, one row per grain: the values of all layers, each layer's mean before its variance; then what each
// layer keeps; then its number of forwards.
Tensor GrainStatistics::own_table(const Range& grains) const {
  std::vector<Tensor> statistics;
  std::vector<double> kept, forwards, numbers;
  const std::vector<Note> nothing(layers_.size());
  for (int64_t number = grains.begin; number < grains.end; ++number) {
    const auto found = notes_.find(number);
    const auto& notes = found == notes_.end() ? nothing : found->second;
    for (size_t i = 0; i < layers_.size(); ++i) {
      const bool noted = notes[i].mean.defined();
      statistics.push_back(noted ? notes[i].mean : at::zeros_like(layers_[i].mean));
      statistics.push_back(noted ? notes[i].variance : at::zeros_like(layers_[i].variance));
    }
    for (const auto& note : notes) numbers.push_back(note.kept);
    for (const auto& note : notes) numbers.push_back(static_cast<double>(note.forwards));
  }
  const auto columns = static_cast<int64_t>(2 * layers_.size());
  const auto type = at::TensorOptions(at::kDouble);
  if (grains.size() == 0) return at::zeros({0, values() + columns}, type.device(rank_.device()));
  // The memory is pinned: CUDA does not tell when it has read other memory, and this memory is freed when the call is
  // over.
  const Tensor on_host = at::empty({grains.size(), columns}, type.pinned_memory(!rank_.device().is_cpu()));
  std::copy(numbers.begin(), numbers.end(), on_host.mutable_data_ptr<double>());
  const Tensor of_host = on_host.to(type.device(rank_.device()), /*non_blocking=*/true);
  return at::cat({at::cat(statistics).to(at::kDouble).view({grains.size(), values()}), of_host}, 1);
}

int64_t GrainStatistics::values() const {
  int64_t count = 0;
  for (const auto& layer : layers_) count += layer.mean.numel() + layer.variance.numel();
  return count;
}

void GrainStatistics::apply(const Tensor& table) {
  const auto layers = static_cast<int64_t>(layers_.size());
  const Tensor kept = table.narrow(1, values(), layers), forwards = table.narrow(1, values() + layers, layers);
  Tensor weights;  // the weights of the values; undefined if all are 1
  for (int64_t i = 0; i < layers; ++i) {
    if (following(*layers_[i].module)->momentum) continue;
    if (!weights.defined()) weights = at::ones_like(forwards);
    const Tensor these = forwards.select(1, i), none = these == 0;
    const Tensor so_far = these.cumsum(0) + layers_[i].batches.to(at::kDouble);
    kept.select(1, i).copy_(at::where(none, 1, (so_far - these) / so_far));
    weights.select(1, i).copy_(at::where(none, 0, these / so_far));
  }
  std::vector<int64_t> counts;
  std::vector<Tensor> now;
  for (const auto& layer : layers_) {
    counts.push_back(layer.mean.numel() + layer.variance.numel());
    now.push_back(layer.mean);
    now.push_back(layer.variance);
  }
  Tensor noted = table.narrow(1, 0, values());
  if (weights.defined()) noted = noted * spread_over_values(weights, counts);
  const Tensor kept_values = spread_over_values(kept, counts);
  const Tensor statistics = at::cat(now).to(at::kDouble);
  for (int64_t grain = 0; grain < table.size(0); ++grain) statistics.mul_(kept_values[grain]).add_(noted[grain]);

  int64_t place = 0;
  for (const Tensor& buffer : now) {
    buffer.variable_data().copy_(statistics.narrow(0, place, buffer.numel()));
    place += buffer.numel();
  }
  const Tensor all_forwards = forwards.sum(0).to(at::kLong);
  for (int64_t i = 0; i < layers; ++i) {
    if (layers_[i].counts_batches) layers_[i].batches.variable_data().add_(all_forwards[i]);
  }
}

}  // namespace lockstep

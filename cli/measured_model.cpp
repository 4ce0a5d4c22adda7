#include "measured_model.hpp"

#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <lockstep/devices/memory_format.hpp>
#include <lockstep/profile/layer_profile.hpp>
#include <lockstep/ranks/rank.hpp>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

namespace lockstep::cli {

namespace {

// Gives the numbers of slices that some mesh over so many devices can use.
std::vector<int> tensor_ranks(size_t devices) {
  std::vector<int> counts = ProfileOptions().tensor_ranks;
  std::erase_if(counts, [&](int count) { return devices % static_cast<size_t>(count) != 0; });
  return counts;
}

// Gives the options' text: "width 0.5, images of 96 x 96".
std::string options_text(const ModelOptions& model) {
  const std::string text = to_string(model);
  return text == model.name ? "" : text.substr(std::min(text.size(), model.name.size() + 2));
}

}  // namespace

std::string name_of(const ModelProfile& profile) {
  return profile.model + (profile.options.empty() ? "" : ", " + profile.options);
}

Dataset stand_in_for(const ModelOptions& model, int64_t samples) {
  if (learns_text(model)) {
    const at::Tensor tokens = at::arange((model.context + 1) * samples).remainder(256).view({samples, -1});
    return {tokens.narrow(1, 0, model.context).contiguous(), tokens.narrow(1, 1, model.context).contiguous()};
  }
  return {at::full({samples, 1, 28, 28}, 0.5, at::kFloat), at::zeros({samples}, at::kLong)};
}

MeasuredModel measure_model(const ModelOptions& model, const Devices& devices, const MeasureOptions& options) {
  MeasuredModel measured;
  const auto on_each = [&](Rank& rank) {
    auto net = make_model(model);
    set_memory_format(*net, fast_memory_format(model, rank.device()));  // `lockstep train` does the same
    const Dataset samples = stand_in_for(model, options.batch_size);
    const Batch sample{samples.x, samples.y, options.batch_size};
    ModelProfile profile =
        lockstep::profile(net, sample, model_loss(model), rank,
                          {.seconds = options.seconds, .tensor_ranks = tensor_ranks(options.planned_devices)});
    const Cluster cluster = measured_cluster(profile, rank);
    if (rank.index_in_process() != 0) return;
    measured = {std::move(profile), cluster};
  };
  run(devices, on_each, {.threads_per_rank = options.threads_per_rank});
  measured.profile.model = model.name;
  measured.profile.options = options_text(model);
  return measured;
}

}  // namespace lockstep::cli

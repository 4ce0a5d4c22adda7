// Gives the options whose types hold one choice at a time as flags and config.json have them: a value for each key.
#pragma once

#include <lockstep/data_parallel/communication_hook.hpp>
#include <lockstep/trainer/train_options.hpp>

#include "option_names.hpp"

#include <array>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <utility>

namespace lockstep {

enum class Compression { none, bf16, fp16, powersgd };

template <>
struct Names<Compression> {
  static constexpr auto what = "the compression of gradients";
  static constexpr std::array all{std::pair{Compression::none, "none"}, std::pair{Compression::bf16, "bf16"},
                                  std::pair{Compression::fp16, "fp16"}, std::pair{Compression::powersgd, "powersgd"}};
};

enum class Images { fashion_mnist, synthetic };

template <>
struct Names<Images> {
  static constexpr auto what = "the data set";
  static constexpr std::array all{std::pair{Images::fashion_mnist, "fashion-mnist"},
                                  std::pair{Images::synthetic, "synthetic"}};
};

// Has a value for each key of the options whose types hold one choice. So it can hold two choices, which no
// TrainOptions can: the options of two ways, a text beside images.
struct FlatOptions {
  Compression compress = Compression::none;
  int64_t compress_rank = 0;                  // 0: PowerSgd's default
  LocalSgdOptions local = {.sync_every = 0};  // sync_every 0: gradients are averaged
  int zero_stage = 0;
  std::optional<ModelSplit> split = {};
  Images data = Images::fashion_mnist;
  std::filesystem::path data_dir = {};  // empty: where packages put Fashion-MNIST, or other data
  std::filesystem::path text = {};      // empty: images
  int keep_last = Checkpoints().last;   // 0: no checkpoints
  int64_t checkpoint_every = 0;
  int64_t grain = 0;  // 0: none
  double check_arithmetic = 0;
};

// flat() gives the options' values by their keys, and take_flat() puts them back. A split by data alone gives way to
// any other way. Throws Error for two choices that no TrainOptions can have (check_flat in option_pairs.hpp).
FlatOptions flat(const TrainOptions& options);
void take_flat(const FlatOptions& values, TrainOptions& options);

// Tells whether the network is split over the ranks by data alone, in one batch at a time.
bool by_data_alone(const ModelSplit& split);

// Puts the split in the place of the way's own, or removes that. Throws Error as take_flat() does.
void set_split(const std::optional<ModelSplit>& split, TrainOptions& options);

// Makes the way's hook for one rank. Null means that gradients are averaged as they are.
std::shared_ptr<CommunicationHook> make_communication_hook(const TrainOptions& options);

}  // namespace lockstep

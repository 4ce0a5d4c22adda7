#include "communication_flags.hpp"

#include <lockstep/data_parallel/power_sgd.hpp>

#include "add_option.hpp"
#include "base/number_text.hpp"
#include "flag_checks.hpp"
#include "text.hpp"

namespace lockstep::cli {

void add_flags(CLI::App& app, CommunicationFlags& flags) {
  const TrainOptions defaults;
  const auto add = [&](const char* name, auto& value, const char* type, const std::string& description,
                       const std::string& default_text) {
    return add_option(app, name, value, type, description, "What devices send each other", default_text);
  };
  add("--compress", flags.compress, "NAME",
      "none: gradients as they are\n"
      "bf16, fp16: rounded to 16 bits, half of the bytes; fp16 overflows at 65504\n"
      "powersgd: as products of thin matrices (Vogels et al. 2019), what is left out comes later (not with a split by "
      "layers or channels)\n",
      std::string(to_string(defaults.compress)));
  add("--compress-rank", flags.compress_rank, "R", "columns of --compress powersgd's matrices: more send more",
      std::to_string(PowerSgdOptions().rank))
      ->check(number_between<int64_t, 1>);
  add("--sync-every", flags.sync_every, "H",
      "devices take H steps each by themselves, then average their parameters, also at the end of an epoch (local SGD; "
      "not with a split by layers or channels); 0: gradients at every step",
      std::to_string(defaults.sync_every))
      ->check(number_between<int64_t, 0>);
  add("--outer-lr", flags.outer_lr, "X",
      "of --sync-every: what the devices moved on average is a gradient, for this learning rate. DiLoCo (Douillard et "
      "al. 2023) has 0.7",
      number_text(defaults.outer_lr))
      ->check(rate);
  add("--outer-momentum", flags.outer_momentum, "X", "and for this Nesterov momentum; DiLoCo has 0.9",
      number_text(defaults.outer_momentum))
      ->check(rate);
}

void apply(const CommunicationFlags& flags, TrainOptions& options) {
  if (flags.compress) options.compress = compression_from(*flags.compress);
  if (flags.compress && options.compress != Compression::powersgd) options.compress_rank = 0;
  override_with(flags.compress_rank, options.compress_rank);
  override_with(flags.sync_every, options.sync_every);
  if (flags.sync_every && options.sync_every == 0) {
    options.outer_lr = TrainOptions().outer_lr;
    options.outer_momentum = TrainOptions().outer_momentum;
  }
  override_with(flags.outer_lr, options.outer_lr);
  override_with(flags.outer_momentum, options.outer_momentum);
}

}  // namespace lockstep::cli

#include "update_flags.hpp"

#include <sstream>
#include <vector>

#include "add_option.hpp"
#include "base/number_text.hpp"
#include "flag_checks.hpp"
#include "text.hpp"

namespace lockstep::cli {

namespace {

// A check for CLI11: numbers from 1 with commas between them.
std::string epochs_list(const std::string& text) {
  std::istringstream items(text + ",");
  for (std::string item; std::getline(items, item, ',');) {
    const std::string wrong = number_between<int, 1>(item);
    if (!wrong.empty()) return wrong + "; it takes epochs as in 30,60,80";
  }
  return "";
}

std::vector<int> epochs_of(const std::string& text) {
  std::vector<int> epochs;
  std::istringstream items(text);
  for (std::string item; std::getline(items, item, ',');) epochs.push_back(std::stoi(item));
  return epochs;
}

}  // namespace

void add_flags(CLI::App& app, UpdateFlags& flags) {
  const TrainOptions defaults;
  const auto add = [&](const char* name, auto& value, const char* type, const std::string& description,
                       const std::string& default_text = {}) {
    return add_option(app, name, value, type, description, "Batches and updates", default_text);
  };
  add("--batch-size", flags.batch_size, "N", "samples per step, over all devices together",
      std::to_string(defaults.batch_size))
      ->check(number_between<int64_t, 1>);
  add("--scale-batch", flags.scale_batch, "K", "K times --batch-size, for --scale-lr and --warmup to go by",
      std::to_string(defaults.scale_batch))
      ->check(number_between<int64_t, 1>);
  add("--accumulate", flags.accumulate, "N",
      "each device computes its part of a batch in N parts, one after the other, before the update: the same gradients "
      "(BatchNorm normalises over such a part), less memory; a pipeline has its microbatches instead",
      std::to_string(defaults.accumulate))
      ->check(number_between<int, 1>);
  add("--balance", flags.balance, "SHARES",
      "equal: each device gets as many samples of a batch, give or take one\n"
      "auto: in proportion to its speed, which is measured all along; two runs then do not give the same bits\n"
      "2,1: the first device gets twice as many as the second\n",
      to_string(defaults.balance));
  add("--optimizer", flags.optimizer, "NAME",
      "sgd, adam, adamw; for large batches lars (You et al. 2017), lamb (You et al. 2020), which scale a layer's "
      "update by the layer's norm (not with a split by channels)",
      std::string(to_string(defaults.optimizer)));
  add("--momentum", flags.momentum, "X", "of sgd and lars, whose authors take 0.9", number_text(defaults.momentum))
      ->check(rate);
  add("--weight-decay", flags.weight_decay, "X",
      "lambda: of sgd, adam and lars added to the gradient, of adamw and lamb beside it",
      number_text(defaults.weight_decay))
      ->check(rate);
  add("--clip", flags.clip, "X",
      "the largest norm of a step's gradients, over the whole network: larger ones are scaled down to it; 0: none",
      number_text(defaults.clip))
      ->check(rate);
  add("--lr", flags.lr, "X",
      "learning rate for batches of --reference-batch samples; the default is for sgd; lenet wants about 0.001 with "
      "adam and adamw, 0.01 with lamb, 8 with lars",
      number_text(defaults.lr))
      ->check(rate);
  add("--scale-lr", flags.scale_lr, "RULE",
      "for k times the reference batch: none, sqrt: sqrt(k) times the learning rate, linear: k times (Goyal et al. "
      "2017)",
      std::string(to_string(defaults.scale_lr)));
  add("--reference-batch", flags.reference_batch, "N", "the batch size that --lr is for (default: --batch-size)")
      ->check(number_between<int64_t, 1>);
  add("--warmup", flags.warmup, "EPOCHS",
      "in the first epochs the learning rate grows at every step, from 1/k of the full one (Goyal et al. 2017)",
      number_text(defaults.warmup))
      ->check(rate);
  add("--schedule", flags.schedule, "NAME",
      "constant\n"
      "step: times --step-factor after each of --step-epochs\n"
      "cosine: falls to 0 over the epochs after the warm-up\n",
      std::string(to_string(defaults.schedule)));
  add("--step-epochs", flags.step_epochs, "LIST", "of --schedule step, as in 30,60,80")->check(epochs_list);
  add("--step-factor", flags.step_factor, "X", "of --schedule step", number_text(defaults.step_factor))->check(rate);
}

void apply(const UpdateFlags& flags, TrainOptions& options) {
  override_with(flags.batch_size, options.batch_size);
  override_with(flags.scale_batch, options.scale_batch);
  override_with(flags.accumulate, options.accumulate);
  if (flags.balance) options.balance = balance_rule_from(*flags.balance);
  if (flags.optimizer) options.optimizer = optimizer_from(*flags.optimizer);
  override_with(flags.momentum, options.momentum);
  override_with(flags.weight_decay, options.weight_decay);
  override_with(flags.clip, options.clip);
  override_with(flags.lr, options.lr);
  override_with(flags.reference_batch, options.reference_batch);
  override_with(flags.warmup, options.warmup);
  override_with(flags.step_factor, options.step_factor);
  if (flags.scale_lr) options.scale_lr = scaling_from(*flags.scale_lr);
  if (flags.schedule) options.schedule = lr_schedule_from(*flags.schedule);
  if (flags.schedule && options.schedule != LrSchedule::step) options.step_epochs.clear();
  if (flags.step_epochs) options.step_epochs = epochs_of(*flags.step_epochs);
}

}  // namespace lockstep::cli

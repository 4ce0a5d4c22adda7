#include "train_plan.hpp"

#include <lockstep/base/error.hpp>
#include <lockstep/models/models.hpp>
#include <lockstep/ranks/rank.hpp>

#include "measured_model.hpp"
#include "text.hpp"
#include "trainer/flat_options.hpp"
#include "trainer/train_options.hpp"

namespace lockstep::cli {

namespace {

Error wrong(const std::string& file, const std::string& what) {
  return Error("--plan " + file + ": " + what);
}

// Grains, if there are any, are the pipeline's microbatches.
void take_split(ModelSplit split, TrainOptions& options) {
  if (options.batch.grain) split.microbatches = 1;
  set_split(split, options);
}

}  // namespace

Devices devices_of(const Plan& plan, const std::string& file) {
  if (plan.devices.empty()) return {};
  try {
    return parse_devices(plan.devices);
  } catch (const Error& error) {
    throw wrong(file, std::string("it was made for the devices ") + plan.devices + ": " + error.what() +
                          ". --devices names others in their place");
  }
}

void follow(const Plan& plan, const std::string& file, TrainOptions& options) {
  const ModelOptions model = options.model;
  const auto net = make_model(model);
  const int ranks = this_process().count == 1 ? static_cast<int>(options.devices.size()) : plan.split.mesh.size();
  try {
    check_plan(plan, net, ranks);
  } catch (const Error& error) {
    const bool other_model = plan.layers != model_signature(net);
    throw wrong(file, error.what() + (other_model ? "; this run is of " + to_string(model) : ""));
  }
  take_split(plan.split, options);
}

std::string plan_here(TrainOptions& options) {
  const MeasuredModel measured = measure_model(options.model, options.devices,
                                               {.batch_size = options.batch.global(),
                                                .threads_per_rank = options.threads_per_rank,
                                                .planned_devices = options.devices.size()});
  // If an option only works along the data axis, no other axis is tried.
  const bool any_axis = std::holds_alternative<Averaged>(options.way) && !options.sync_batchnorm &&
                        options.batch.balance == BalanceRule();
  const Plan best =
      make_plan(measured.profile, measured.cluster,
                {.batch_size = options.batch.global(),
                 .pipeline = any_axis && options.batch.accumulate == 1,
                 .tensor = any_axis && !needs_whole_layers(options.optimizer.kind) && !options.batch.grain,
                 .devices = ""});
  Plan one;
  one.batch_size = options.batch.global();
  const double alone = predict(measured.profile, measured.cluster, one).step_seconds;
  take_split(best.split, options);
  const double speed_up = alone / best.prediction.step_seconds;
  return "plan: " + to_string(best.split) +
         format("; predicted: %.1f ms per step, %.2f times as fast as one device", 1e3 * best.prediction.step_seconds,
                speed_up) +
         (speed_up < 1 ? " (which would be faster alone)\n" : "\n");
}

}  // namespace lockstep::cli

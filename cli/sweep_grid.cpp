#include "sweep.hpp"

#include <lockstep/optim/learning_rate.hpp>

#include <optional>
#include <set>
#include <utility>

#include "add_option.hpp"
#include "base/number_text.hpp"
#include "flag_checks.hpp"
#include "run_name.hpp"
#include "trainer/option_text.hpp"
#include "trainer/train_options.hpp"
#include "usage.hpp"

namespace lockstep::cli {

namespace {

// Gives the values of an axis. An axis that was not given has the value of lockstep train.
std::vector<std::optional<std::string>> axis(const std::vector<std::string>& given) {
  if (given.empty()) return {std::nullopt};
  return {given.begin(), given.end()};
}

// Gives the name of a run's folder: "2xcpu_batch512_lr0.1_linear". The name has all axes, also axes with a single
// value, so that a larger grid finds the runs of a smaller one.
std::string grid_name(const TrainOptions& options) {
  const std::string name = short_name(options.devices) + "_batch" + std::to_string(options.batch.global()) + "_lr" +
                           number_text(learning_rate_of(options).lr);
  return options.rate.scaling == LearningRate::Scaling::none
             ? name
             : name + "_" + std::string(to_string(options.rate.scaling));
}

}  // namespace

void add_flags(CLI::App& app, SweepFlags& flags) {
  add_flags(app, flags.train);
  // Removes flags that are an axis here, and flags that are for a single run.
  for (const char* name : {"--devices", "--batch-size", "--scale-batch", "--lr", "--scale-lr", "--config", "--recipe",
                           "--resume", "--plan", "--trace", "--progress"}) {
    app.remove_option(app.get_option(name));
  }
  app.get_option("--name")->description("folder of this sweep in --runs-dir; finished runs in it stay");
  const TrainOptions defaults;
  const auto add = [&app](const char* name, auto& value, const char* type, const std::string& description,
                          const std::string& default_text) {
    return app.add_option(name, value, description)->type_name(type)->group("The grid")->default_str(default_text);
  };
  add("--devices", flags.devices, "LIST...", "as for lockstep train, one or several: 1 2, or cpu 2xcpu 4xcpu", "");
  add("--batch-size", flags.batch_sizes, "N...", "samples per step, over all devices together",
      std::to_string(defaults.batch.size))
      ->check(number_between<int64_t, 1>);
  add("--lr", flags.rates, "X...", "learning rates for batches of --reference-batch samples", "by the optimizer")
      ->check(rate);
  add("--scale-lr", flags.scale_lr, "RULE...", "how the learning rate changes with other batches: none, sqrt, linear",
      std::string(to_string(defaults.rate.scaling)));
}

std::vector<SweepRun> grid(const SweepFlags& flags) {
  const std::string reference = flags.train.text("reference_batch");
  if (reference.empty() && (!flags.scale_lr.empty() || !flags.train.text("warmup").empty())) {
    throw UsageError(
        "--scale-lr and --warmup go by how many times the reference batch a batch is; --reference-batch says which "
        "batch size --lr is for");
  }
  std::vector<SweepRun> runs;
  std::set<std::string> names;
  for (const auto& devices : axis(flags.devices)) {
    for (const auto& batch_size : axis(flags.batch_sizes)) {
      for (const auto& lr : axis(flags.rates)) {
        for (const auto& rule : axis(flags.scale_lr)) {
          TrainFlags train = flags.train;
          train.given["devices"] = devices;
          train.given["batch_size"] = batch_size;
          train.given["lr"] = lr;
          train.given["scale_lr"] = rule;
          if (batch_size.value_or(std::to_string(TrainOptions().batch.size)) == reference) {
            for (const char* key : {"scale_lr", "warmup", "reference_batch"}) train.given.erase(key);
          }
          SweepRun run{to_options(train)};
          if (train.text("on_nan").empty()) run.options.on_nan = OnNan::go_on;  // a too large rate is a result, too
          run.options.keep.resume = "auto";
          const std::string name = grid_name(run.options);
          run.options.keep.run_dir /= name;
          if (names.insert(name).second) runs.push_back(std::move(run));
        }
      }
    }
  }
  return runs;
}

}  // namespace lockstep::cli

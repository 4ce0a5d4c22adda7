#include "sweep_grid.hpp"

#include <lockstep/optim/learning_rate.hpp>

#include <algorithm>
#include <optional>
#include <set>
#include <utility>

#include "add_option.hpp"
#include "base/number_text.hpp"
#include "flag_checks.hpp"
#include "run_name.hpp"
#include "text.hpp"
#include "trainer/train_options.hpp"
#include "usage.hpp"

namespace lockstep::cli {

namespace {

// The values of an axis. An axis that was not given has the value of lockstep train.
std::vector<std::optional<std::string>> axis(const std::vector<std::string>& given) {
  if (given.empty()) return {std::nullopt};
  return {given.begin(), given.end()};
}

SweepRun point_of(const TrainFlags& flags) {
  TrainFlags without_warmup = flags;
  without_warmup.given.erase("warmup");
  SweepRun run{to_options(without_warmup)};
  TrainOptions& options = run.options;
  if (flags.text("on_nan").empty()) options.on_nan = OnNan::go_on;  // a rate that is too large is a result, too
  const LearningRate rate = learning_rate_of(options);
  run.is_reference = rate.batch == rate.reference_batch;
  if (run.is_reference) {
    options.rate.scaling = LrScaling::none;
  } else {
    from_flags([&] {
      take_given({{"warmup", flags.given.at("warmup")}}, options);
      return checked(options);
    });
  }
  // Then the reference batch changes nothing, and a sweep with it can go on without it.
  if (options.rate.scaling == LrScaling::none && options.rate.warmup_epochs == 0) options.rate.reference_batch = 0;
  options.keep.run_dir /= grid_name(options);
  return run;
}

// Rules that scale nothing are a mistake: the table would not show what was asked for.
void check_rules(const SweepFlags& flags, const std::vector<SweepRun>& runs) {
  const auto is_reference = [](const SweepRun& run) { return run.is_reference; };
  if (!std::all_of(runs.begin(), runs.end(), is_reference)) return;
  const bool rules = std::any_of(flags.scale_lr.begin(), flags.scale_lr.end(),
                                 [](const std::string& rule) { return scaling_from(rule) != LrScaling::none; });
  if (!rules && std::atof(flags.train.text("warmup").c_str()) == 0) return;
  throw UsageError(
      "--scale-lr and --warmup go by how many times the reference batch a batch is, and here each is its own; "
      "--reference-batch says which batch size --lr is for");
}

}  // namespace

void add_flags(CLI::App& app, SweepFlags& flags) {
  add_flags(app, flags.train);
  // Removes flags that are an axis here, and those for a single run.
  for (const char* name :
       {"--devices", "--batch-size", "--lr", "--scale-lr", "--config", "--resume", "--plan", "--trace", "--progress"}) {
    app.remove_option(app.get_option(name));
  }
  app.get_option("--name")->description(
      "folder of this sweep in --runs-dir; finished runs in it are not trained again");
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
  add("--target", flags.target, "X", "test accuracy; the table says when each run reached it",
      number_text(flags.target))
      ->check(rate)
      ->take_last();
  add("--jobs", flags.jobs, "N",
      "train at most N runs at once; with 1 their seconds can be compared (default: as many as have a core per thread, "
      "and GPUs of their own)",
      "")
      ->check(number_between<int, 1, 1024>)
      ->take_last();
}

std::vector<SweepRun> grid(const SweepFlags& flags) {
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
          SweepRun run = point_of(train);
          if (names.insert(grid_name(run.options)).second) runs.push_back(std::move(run));
        }
      }
    }
  }
  check_rules(flags, runs);
  return runs;
}

std::string grid_name(const TrainOptions& options) {
  const std::string name = short_name(options.devices) + "_batch" + std::to_string(options.batch.global()) + "_lr" +
                           number_text(learning_rate_of(options).lr);
  return options.rate.scaling == LrScaling::none ? name : name + "_" + std::string(to_string(options.rate.scaling));
}

}  // namespace lockstep::cli

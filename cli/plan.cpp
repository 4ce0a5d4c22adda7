// lockstep plan: measures a model and this machine, or takes a described one, and says how best to split the model.
#include <lockstep/base/error.hpp>
#include <lockstep/devices/device_info.hpp>
#include <lockstep/models/models.hpp>
#include <lockstep/plan/plan.hpp>
#include <lockstep/ranks/rank.hpp>

#include <memory>
#include <optional>
#include <sstream>
#include <string>

#include "add_option.hpp"
#include "commands.hpp"
#include "common_flags.hpp"
#include "flag_checks.hpp"
#include "io/atomic_file.hpp"
#include "measured_model.hpp"
#include "plan_report.hpp"
#include "text.hpp"
#include "usage.hpp"

namespace lockstep::cli {

namespace {

const char* const plan_explanation =
    "Every layer is measured on one device, then all devices compute at once, then\n"
    "their links are measured: do it on a quiet machine. From that the time, memory\n"
    "and bytes sent of every way to split are predicted; docs/plan.md says how. It\n"
    "takes --seconds for the whole net, and once more for each way to slice it.\n"
    "\n"
    "  kept        bytes that a layer's forward leaves for its backward\n"
    "  candidates  each mesh of all devices: so many replicas of the network, stages\n"
    "              of layers, and slices of each layer by channels\n"
    "  memory      of the fullest device: parameters, gradients, the optimizer's\n"
    "              state, activations\n"
    "  idle        share of the step in which a device does not compute, on average\n"
    "\n"
    "Examples:\n"
    "  lockstep plan --model resnet18 --devices 2 --out plan.json\n"
    "      The best plan for two devices of this machine. lockstep train --plan\n"
    "      plan.json trains so, and lockstep-bench compare measures the main ones.\n"
    "  lockstep plan --model alexnet --width 0.25 --simulate docs/cluster.json\n"
    "      For a cluster that need not be there: the layers are measured here, on\n"
    "      one device, and everything else is as the file says.\n"
    "  lockstep plan --model alexnet --keep-profile alexnet.json\n"
    "  lockstep plan --profile alexnet.json --simulate docs/cluster.json\n"
    "      The same without measuring again.\n";

struct PlanFlags {
  ModelOptions model;
  std::optional<std::string> devices;
  std::string schedules, simulate, out, profile, keep_profile, keep_cluster;
  int threads_per_rank = 1;
  int64_t batch_size = 256;
  double optimizer_state = 0;
  double seconds = 10;
  size_t rows = 12;
};

std::vector<PipelineSchedule> schedules_of(const std::string& text) {
  if (text.empty()) return PlanOptions().schedules;
  std::vector<PipelineSchedule> schedules;
  std::istringstream words(text);
  for (std::string word; std::getline(words, word, ',');) {
    schedules.push_back(from_flags([&] { return schedule_from(word); }));
  }
  return schedules;
}

std::string device_list(const Devices& devices) {
  std::string text;
  for (const auto& device : devices) text += (text.empty() ? "" : ",") + device.str();
  return text;
}

void check_flags(const PlanFlags& flags) {
  if (!flags.profile.empty() && flags.simulate.empty()) {
    throw UsageError("--profile goes with --simulate: without a described cluster the devices here are measured");
  }
  if (!flags.simulate.empty() && !flags.keep_cluster.empty()) {
    throw UsageError("--keep-cluster does not go with --simulate: no cluster is measured");
  }
  from_flags([&] { check_model(flags.model); });
}

// Throws Error before the measuring, which takes a while.
void check_can_be_written(const PlanFlags& flags) {
  for (const auto& file : {flags.out, flags.keep_profile, flags.keep_cluster}) {
    if (!file.empty()) const io::AtomicFile can_be_written(file);
  }
}

void show_plans(const std::vector<Plan>& candidates, const Plan& best, const ModelProfile& profile,
                const Cluster& cluster, const Prediction& alone, const PlanFlags& flags, Output& output) {
  const std::string contention =
      cluster.contention.size() > 1
          ? format("  each device takes %.2f times as long when all of its node compute\n", cluster.contention.back())
          : "";
  output.print(layer_table(profile, flags.batch_size) + contention + "\n" +
               candidate_table(candidates, alone, flags.rows) + "\n" + in_words(best, profile, alone));
  if (best.prediction.step_seconds > alone.step_seconds) {
    output.print("(a plan uses all devices that it is given; here one device alone would be faster)\n");
  }
}

void keep(const std::string& file, const std::string& text, const std::string& what, Output& output) {
  if (file.empty()) return;
  io::write_file(file, text);
  output.print("the " + what + " is kept in " + file + "\n");
}

int plan_command(const PlanFlags& flags, Output& output) {
  check_flags(flags);
  PlanOptions options{.batch_size = flags.batch_size,
                      .training = {.state_bytes_per_parameter_byte = flags.optimizer_state},
                      .schedules = schedules_of(flags.schedules)};
  Devices devices = devices_from(flags.devices);
  std::optional<Cluster> described;
  MeasuredModel measured;
  if (!flags.simulate.empty()) {
    described = read_cluster(flags.simulate);
    devices.resize(1, devices[0]);
  } else {
    options.devices = device_list(devices);
  }
  if (!flags.profile.empty()) measured.profile = read_profile(flags.profile);
  const bool speaks = this_process().index == 0;
  if (speaks) {
    check_can_be_written(flags);
    const std::string where =
        described ? std::to_string(described->devices.size()) + " of " + flags.simulate : to_string(devices);
    output.print("lockstep " + version() + ", LibTorch " + torch_version() + "\n" +
                 table({{"model", flags.profile.empty() ? to_string(flags.model) : name_of(measured.profile)},
                        {"devices", where},
                        {"batch size", std::to_string(flags.batch_size) + " over all devices"}}) +
                 "\n");
  }
  if (flags.profile.empty()) {
    measured = measure_model(flags.model, devices,
                             {.batch_size = flags.batch_size,
                              .seconds = flags.seconds,
                              .threads_per_rank = flags.threads_per_rank,
                              .planned_devices = described ? described->devices.size() : devices.size()});
  }
  const Cluster& cluster = described ? *described : measured.cluster;
  Plan one;
  one.batch_size = flags.batch_size;
  const Prediction alone = predict(measured.profile, cluster, one, options.training);
  const auto candidates = candidate_plans(measured.profile, cluster, options);
  const Plan best = best_plan(candidates);
  if (!speaks) return 0;
  show_plans(candidates, best, measured.profile, cluster, alone, flags, output);
  keep(flags.out, to_json(best), "plan", output);
  keep(flags.keep_profile, to_json(measured.profile), "profile", output);
  keep(flags.keep_cluster, to_json(cluster), "cluster", output);
  return 0;
}

}  // namespace

Command add_plan(CLI::App& program) {
  CLI::App* const app = program.add_subcommand("plan", "Choose how to split a network over devices, and predict it.");
  app->footer(plan_explanation);
  const auto flags = std::make_shared<PlanFlags>();
  const OptionAdder add{*app};
  add_model_flags(*app, flags->model);
  add("--devices", flags->devices, "LIST",
      "as for lockstep train (default: every GPU, or else every core); with --simulate the first of them measures the "
      "layers");
  add_threads_flag(*app, flags->threads_per_rank);
  add("--batch-size", flags->batch_size, "N", "samples per step, over all devices together", "256")
      ->check(number_between<int64_t, 1>);
  add("--optimizer-state", flags->optimizer_state, "X",
      "values that the optimizer keeps per parameter: 0 for SGD, 1 with momentum, 2 for Adam", "0")
      ->check(rate);
  add("--schedules", flags->schedules, "LIST", "pipeline schedules to try (default: 1f1b,gpipe,interleaved)")
      ->check(not_empty);
  add("--simulate", flags->simulate, "FILE", "plan for the cluster that this JSON file describes")->check(not_empty);
  add("--out", flags->out, "FILE", "write the plan to this file")->check(not_empty);
  add("--seconds", flags->seconds, "X",
      "how long the layers may be measured, the whole net's and each slice's; the largest batches are left out first",
      "10")
      ->check(rate);
  add("--rows", flags->rows, "N", "how many candidates to print", "12")->check(number_between<size_t, 1>);
  add("--keep-profile", flags->keep_profile, "FILE", "write what was measured of the layers to this file")
      ->check(not_empty);
  add("--profile", flags->profile, "FILE",
      "take a file of --keep-profile, and the model that it names, instead of measuring; only with --simulate")
      ->check(not_empty);
  add("--keep-cluster", flags->keep_cluster, "FILE",
      "write what was measured of the devices to this file, for --simulate")
      ->check(not_empty);
  return {app, [flags](Output& output) { return plan_command(*flags, output); }};
}

}  // namespace lockstep::cli

#include "benches.hpp"

#include <lockstep/base/error.hpp>
#include <lockstep/devices/device_info.hpp>
#include <lockstep/layout/pipeline_schedule.hpp>
#include <lockstep/models/text.hpp>
#include <lockstep/plan/plan.hpp>
#include <lockstep/ranks/rank.hpp>
#include <lockstep/trainer/train_options.hpp>

#include <algorithm>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "base/number_text.hpp"
#include "cli/add_option.hpp"
#include "cli/common_flags.hpp"
#include "cli/flag_checks.hpp"
#include "cli/measured_model.hpp"
#include "cli/text.hpp"
#include "cli/usage.hpp"
#include "report.hpp"
#include "scheme.hpp"

namespace lockstep::cli {

namespace {

const char* const compare_explanation =
    "The schemes take turns, so that a change of the machine's load meets all of them\n"
    "alike; the best round of each counts. All start with equal weights and see the\n"
    "same batches. The model is profiled first, which balances the pipelines' stages\n"
    "and gives the predictions (docs/plan.md). With --simulate both are for a\n"
    "described cluster, so that a simulation can be held against real runs; with\n"
    "--profile too nothing is measured before them. The tables come when all have\n"
    "run.\n"
    "\n"
    "  data N                replicas of the network, each for a part of the batch\n"
    "  data N, ZeRO 1        the same, but each keeps only its slice of the\n"
    "                        optimizer's state (docs/guide/zero.md)\n"
    "  data N, ZeRO 2        and only its slice of the gradients\n"
    "  data N, ZeRO 3        and only its slice of the parameters\n"
    "  layers, one batch …   each device some layers; they take turns\n"
    "  pipeline              the same with microbatches, so that they compute at once\n"
    "  tensor N              each device a slice of every layer; \"alternating\" also\n"
    "                        convolutions by output and then by input\n"
    "\n"
    "  step ms     median of the steps, of the slowest device\n"
    "  predicted   what lockstep plan makes of the profile; - where that has none\n"
    "  speed-up    one device's step over this one's\n"
    "  memory      of the fullest device: parameters (and buffers), gradients, the\n"
    "              optimizer's state (momentum), activations at their peak (and all\n"
    "              else: the batch, messages, units that ZeRO 3 has gathered);\n"
    "              predicted beside it\n"
    "  sent        per step, by the device that sends most; an allreduce counts as a\n"
    "              ring's. Threads of one process share memory and copy less\n"
    "  idle        share of the step not in layers, loss or update: waiting for\n"
    "              others, sending, adding\n"
    "  formula     a pipeline's idle share if all stages took equally long and\n"
    "              messages no time: (S - 1) / (M + S - 1), of S ranks and M\n"
    "              microbatches; interleaved with v M, of v stages per rank\n"
    "  loss        of the last step's batch. BatchNorm (resnet18) normalises over\n"
    "              what a device computes at once: there data and pipelines differ\n"
    "\n"
    "Examples:\n"
    "  lockstep-bench compare --model lenet --devices 2\n"
    "  lockstep-bench compare --model alexnet --width 0.25 --batch-size 64 --steps 5\n"
    "  lockstep plan --model mlp --devices 4xcpu --keep-profile mlp.json \\\n"
    "      --keep-cluster here.json\n"
    "  lockstep-bench compare --model mlp --devices 2xcpu --profile mlp.json \\\n"
    "      --simulate here.json\n";

struct CompareFlags {
  SchemeOptions scheme;
  std::optional<std::string> devices;
  std::string data = "fashion-mnist", data_dir, text, json, profile, simulate;
  int rounds = 3;
  double seconds = 10;
};

struct Row {
  Scheme scheme;
  std::optional<Prediction> predicted = {};
  std::optional<SchemeCost> cost = {};
};

const TrainingCost momentum{.state_bytes_per_parameter_byte = 1};  // the cost of train_scheme()'s optimizer

// Gives the best plan whose mesh and schedule are these; none if the model cannot be split so.
std::optional<Plan> planned(const MeasuredModel& model, const MeshShape& mesh, const PlanOptions& options) {
  std::vector<Plan> plans;
  try {
    plans = candidate_plans(model.profile, model.cluster, options);
  } catch (const Error&) {  // nothing fits
    return std::nullopt;
  }
  const auto found =
      std::find_if(plans.begin(), plans.end(), [&](const Plan& plan) { return plan.split.mesh == mesh; });
  return found == plans.end() ? std::nullopt : std::optional(*found);
}

std::string mesh_name(const MeshShape& mesh) {
  std::string name;
  const auto add = [&](int ranks, const char* axis) {
    if (ranks > 1) name += (name.empty() ? "" : " x ") + std::string(axis) + " " + std::to_string(ranks);
  };
  add(mesh.data, "data");
  add(mesh.pipeline, "pipeline");
  add(mesh.tensor, "tensor");
  return name;
}

class Schemes {
 public:
  Schemes(const MeasuredModel& model, const Devices& devices, int64_t batch_size)
      : model_(model), devices_(devices), batch_size_(batch_size) {}

  std::vector<Row> all() {
    add("one device", {devices_[0]}, {});
    const auto count = static_cast<int>(devices_.size());
    for (const auto& mesh : mesh_shapes(count)) {
      if (count == 1) break;
      if (mesh.pipeline == 1) {
        const auto plan = add_plan(mesh_name(mesh), mesh, PipelineSchedule::one_f_one_b);
        const int stages = plan && mesh.data == count ? 3 : 0;
        for (int stage = 1; stage <= stages; ++stage) {
          rows_.push_back({{mesh_name(mesh) + ", ZeRO " + std::to_string(stage), devices_, plan->split, stage}});
        }
      } else if (mesh.pipeline < count) {
        add_plan(mesh_name(mesh) + ", 1f1b", mesh, PipelineSchedule::one_f_one_b);
      } else {
        add_pipelines(mesh);
      }
      if (mesh.tensor == count) add_alternating(mesh);
    }
    return rows_;
  }

 private:
  // Adds layers on different devices that take turns, and then pipelines with microbatches in each schedule.
  void add_pipelines(const MeshShape& mesh) {
    const auto gpipe = add_plan("pipeline, gpipe", mesh, PipelineSchedule::gpipe);
    if (gpipe) {
      ModelSplit layers = gpipe->split;
      layers.microbatches = 1;
      rows_.pop_back();
      add("layers, one batch at a time", devices_, layers);
      add("pipeline, gpipe, " + microbatches(gpipe->split), devices_, gpipe->split);
    }
    add_plan("pipeline, 1f1b", mesh, PipelineSchedule::one_f_one_b);
    add_plan("pipeline, interleaved", mesh, PipelineSchedule::interleaved);
  }

  void add_alternating(const MeshShape& mesh) {
    ModelSplit split{.mesh = mesh, .tensor_rule = TensorRule::alternating};
    if (!rows_.empty() && rows_.back().scheme.split.mesh == mesh)
      add(mesh_name(mesh) + ", alternating", devices_, split);
  }

  std::optional<Plan> add_plan(std::string name, const MeshShape& mesh, PipelineSchedule schedule) {
    const PlanOptions options{.batch_size = batch_size_,
                              .training = momentum,
                              .schedules = {schedule},
                              .max_stages_per_rank = 2,
                              .data = mesh.data > 1,
                              .pipeline = mesh.pipeline > 1,
                              .tensor = mesh.tensor > 1};
    auto plan = planned(model_, mesh, options);
    if (!plan) return plan;
    if (plan->split.mesh.pipeline > 1) name += ", " + microbatches(plan->split);
    add(name, devices_, plan->split);
    return plan;
  }

  void add(const std::string& name, const Devices& devices, const ModelSplit& split) {
    Plan plan;
    plan.batch_size = batch_size_;
    plan.split = split;
    Row row{{name, devices, split}};
    // Only the rule `channels` was profiled.
    if (split.tensor_rule == TensorRule::channels)
      row.predicted = predict(model_.profile, model_.cluster, plan, momentum);
    rows_.push_back(std::move(row));
  }

  static std::string microbatches(const ModelSplit& split) {
    return std::to_string(split.microbatches) + " microbatches";
  }

  const MeasuredModel& model_;
  const Devices& devices_;
  const int64_t batch_size_;
  std::vector<Row> rows_;
};

void measure(std::vector<Row>& rows, const CompareFlags& flags, const Dataset& images) {
  for (int round = 0; round < flags.rounds; ++round) {
    for (auto& row : rows) {
      const SchemeCost cost = train_scheme(row.scheme, flags.scheme, images);
      if (!row.cost || cost.step_seconds < row.cost->step_seconds) row.cost = cost;
    }
  }
}

double idle_by_formula(const Row& row) {
  const ModelSplit& split = row.scheme.split;
  return ideal_idle_share(split.schedule, static_cast<int>(split.mesh.pipeline), split.stages_per_rank,
                          split.microbatches);
}

std::string times_table(const std::vector<Row>& rows) {
  std::vector<std::vector<std::string>> cells = {
      {"scheme", "step ms", "predicted", "speed-up", "sent", "idle", "formula", "loss"}};
  const double alone = rows[0].cost->step_seconds;
  for (const auto& row : rows) {
    const SchemeCost& cost = *row.cost;
    cells.push_back({row.scheme.name, format("%.1f", 1e3 * cost.step_seconds),
                     row.predicted ? format("%.1f", 1e3 * row.predicted->step_seconds) : "-",
                     format("%.2f", alone / cost.step_seconds), bytes_text(cost.bytes_sent),
                     format("%.0f %%", 100 * cost.idle_share),
                     row.scheme.split.mesh.pipeline == 1 ? "-" : format("%.0f %%", 100 * idle_by_formula(row)),
                     format("%.6f", cost.final_loss)});
  }
  return aligned(cells);
}

std::string memory_table(const std::vector<Row>& rows) {
  std::vector<std::vector<std::string>> cells = {
      {"scheme", "memory", "predicted", "parameters", "gradients", "optimizer", "activations"}};
  for (const auto& row : rows) {
    const SchemeCost& cost = *row.cost;
    std::vector<std::string> line = {row.scheme.name, bytes_text(static_cast<double>(cost.memory())),
                                     row.predicted ? bytes_text(row.predicted->memory_bytes()) : "-"};
    for (const int64_t bytes : {cost.parameters, cost.gradients, cost.optimizer_state, cost.activations}) {
      line.push_back(bytes_text(static_cast<double>(bytes)));
    }
    cells.push_back(std::move(line));
  }
  return aligned(cells);
}

nlohmann::ordered_json to_json(const CompareFlags& flags, const std::vector<Row>& rows) {
  nlohmann::ordered_json json;
  json["model"] = to_string(flags.scheme.model);
  json["batch_size"] = flags.scheme.batch_size;
  json["steps"] = flags.scheme.steps;
  json["rounds"] = flags.rounds;
  json["lr"] = flags.scheme.lr;
  json["threads_per_rank"] = flags.scheme.threads_per_rank;
  for (const auto& row : rows) {
    const ModelSplit& split = row.scheme.split;
    const SchemeCost& cost = *row.cost;
    json["schemes"].push_back({{"name", row.scheme.name},
                               {"devices", row.scheme.devices.size()},
                               {"data", split.mesh.data},
                               {"pipeline", split.mesh.pipeline},
                               {"tensor", split.mesh.tensor},
                               {"schedule", to_string(split.schedule)},
                               {"stages_per_rank", split.stages_per_rank},
                               {"microbatches", split.microbatches},
                               {"cuts", split.cuts},
                               {"tensor_rule", to_string(split.tensor_rule)},
                               {"zero_stage", row.scheme.zero_stage},
                               {"step_seconds", cost.step_seconds},
                               {"memory_bytes", cost.memory()},
                               {"parameter_bytes", cost.parameters},
                               {"gradient_bytes", cost.gradients},
                               {"optimizer_bytes", cost.optimizer_state},
                               {"activation_bytes", cost.activations},
                               {"bytes_sent", cost.bytes_sent},
                               {"idle_share", cost.idle_share},
                               {"formula_idle_share", idle_by_formula(row)},
                               {"final_loss", cost.final_loss}});
    if (!row.predicted) continue;
    json["schemes"].back()["predicted_seconds"] = row.predicted->step_seconds;
    json["schemes"].back()["predicted_memory_bytes"] = row.predicted->memory_bytes();
  }
  return json;
}

struct CompareData {
  Dataset train;
  std::string source;
};

// Loads as many sequences of the text as the steps need into memory.
CompareData load_sequences(const CompareFlags& flags) {
  const TextData data = load_text(flags.text, flags.scheme.model.context);
  std::vector<int64_t> numbers(static_cast<size_t>(std::min(data.train.size(), samples_needed(flags.scheme))));
  std::iota(numbers.begin(), numbers.end(), 0);
  return {data.train.read(numbers), data.source};
}

CompareData load(const CompareFlags& flags) {
  check_text_flag(flags.scheme.model, flags.text);
  if (learns_text(flags.scheme.model)) return load_sequences(flags);
  const ImageData images = images_named(flags.data, flags.data_dir);
  return {images.train, images.source};
}

// The model from which predictions and the pipelines' cuts are made: measured here, or as the files say.
MeasuredModel planning_model(const CompareFlags& flags, const Devices& devices) {
  const MeasureOptions options{.batch_size = flags.scheme.batch_size,
                               .seconds = flags.seconds,
                               .threads_per_rank = flags.scheme.threads_per_rank,
                               .planned_devices = devices.size()};
  if (flags.simulate.empty()) return measure_model(flags.scheme.model, devices, options);
  MeasuredModel model;
  model.cluster = read_cluster(flags.simulate);
  if (model.cluster.devices.size() < devices.size()) {
    throw Error("--simulate " + flags.simulate + " describes " + std::to_string(model.cluster.devices.size()) +
                " devices, but " + std::to_string(devices.size()) + " are to train. Take fewer of them with --devices");
  }
  model.cluster.devices.resize(devices.size());
  if (flags.profile.empty()) {
    model.profile = measure_model(flags.scheme.model, {devices[0]}, options).profile;
    return model;
  }
  model.profile = read_profile(flags.profile);
  if (model.profile.signature != model_signature(make_model(flags.scheme.model))) {
    throw Error("--profile " + flags.profile + " is of another net, " + name_of(model.profile) + ", than the flags', " +
                to_string(flags.scheme.model) + ". Give it the flags of the net that it was measured of");
  }
  return model;
}

int compare_command(const CompareFlags& flags, Output& output) {
  if (!flags.profile.empty() && flags.simulate.empty()) {
    throw UsageError("--profile goes with --simulate: without a described cluster the devices here are measured");
  }
  from_flags([&] { check_model(flags.scheme.model); });
  const Devices devices = devices_from(flags.devices);
  const CompareData data = load(flags);
  from_flags([&] { check_images(flags.scheme, data.train); });
  Rows settings = {{"model", to_string(flags.scheme.model)},
                   {"data", data.source},
                   {"devices", to_string(devices)},
                   {"batch size", std::to_string(flags.scheme.batch_size) + " over all devices"},
                   {"steps", std::to_string(flags.scheme.steps) + ", best of " + std::to_string(flags.rounds) +
                                 (flags.rounds == 1 ? " round" : " rounds in turns")}};
  if (!flags.simulate.empty()) settings.push_back({"predicted", "for as many devices of " + flags.simulate});
  output.print("lockstep " + version() + ", LibTorch " + torch_version() + "\n" + table(settings) + "\n");
  const MeasuredModel model = planning_model(flags, devices);
  auto rows = Schemes(model, devices, flags.scheme.batch_size).all();
  measure(rows, flags, data.train);
  output.print(times_table(rows) + "\n" + memory_table(rows));
  write_json(flags.json, "compare", devices, to_json(flags, rows));
  return 0;
}

}  // namespace

Command add_bench_compare(CLI::App& bench) {
  CLI::App* const app =
      bench.add_subcommand("compare", "Train a network split by data, by layers and by channels, side by side.");
  app->footer(compare_explanation);
  const auto flags = std::make_shared<CompareFlags>();
  const OptionAdder add{*app};
  SchemeOptions& scheme = flags->scheme;
  add_model_flags(*app, scheme.model);
  add("--data", flags->data, "NAME", "as for lockstep train", flags->data);
  add("--data-dir", flags->data_dir, "DIR", "as for lockstep train")->check(not_empty);
  add("--text", flags->text, "FILE", "as for lockstep train")->check(not_empty);
  add_devices_flag(*app, flags->devices);
  add_threads_flag(*app, scheme.threads_per_rank);
  add("--batch-size", scheme.batch_size, "N", "samples per step, over all devices together", "256")
      ->check(number_between<int64_t, 1>);
  add("--lr", scheme.lr, "X", "learning rate of SGD with momentum 0.9", number_text(scheme.lr))->check(rate);
  add("--steps", scheme.steps, "N", "measured steps of each scheme in each round", std::to_string(scheme.steps))
      ->check(number_between<int, 1>);
  add_rounds_flag(*app, flags->rounds);
  add("--seconds", flags->seconds, "X", "how long the layers may be profiled", "10")->check(rate);
  add("--simulate", flags->simulate, "FILE",
      "predict for the first devices of the cluster that this JSON file describes, as lockstep plan does; of the "
      "devices here only the first is measured, for the layers")
      ->check(not_empty);
  add("--profile", flags->profile, "FILE",
      "take a file of lockstep plan --keep-profile for this model instead of measuring; only with --simulate")
      ->check(not_empty);
  add_json_flag(*app, flags->json);
  return {app, [flags](Output& output) { return compare_command(*flags, output); }};
}

}  // namespace lockstep::cli

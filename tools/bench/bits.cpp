#include "benches.hpp"

#include <lockstep/base/error.hpp>
#include <lockstep/layout/model_split.hpp>
#include <lockstep/trainer/metrics.hpp>
#include <lockstep/trainer/train_options.hpp>

#include <algorithm>
#include <bit>
#include <cctype>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "base/seconds_since.hpp"
#include "cli/add_option.hpp"
#include "cli/common_flags.hpp"
#include "cli/flag_checks.hpp"
#include "cli/text.hpp"
#include "cli/usage.hpp"
#include "comm/world.hpp"
#include "io/links.hpp"
#include "io/reason.hpp"
#include "report.hpp"
#include "run_program.hpp"
#include "trainer/train_options.hpp"

namespace lockstep::cli {

namespace {

namespace fs = std::filesystem;

const char* const bench_bits_explanation =
    "The same run with --grain, on one layout of ranks after the other: threads,\n"
    "processes and an elastic job of them (on CPUs, and on a GPU that they may share\n"
    "over NCCL: NCCL_MULTI_RANK_GPU_ENABLE=1), ZeRO, unequal parts, pipelines, data\n"
    "times pipeline, and stopped within an epoch and gone on with on other numbers of\n"
    "ranks. Each is a lockstep train of its own, whose command is printed.\n"
    "All must have the same train loss and the same hash of the weights, to the bit;\n"
    "otherwise the exit code is 1. The runs are kept if their bits differ, or if one\n"
    "of them fails.\n"
    "\n"
    "Examples:\n"
    "  lockstep-bench bits --data synthetic\n"
    "  lockstep-bench bits --model resnet18 --width 0.25 --batch-size 6000 --grain 750\n"
    "  lockstep-bench bits --model gpt --text FILE --batch-size 64 --grain 8\n"
    "  lockstep-bench bits --device cuda:0 --json bits.json\n";

struct BenchBitsFlags {
  ModelOptions model;
  std::string data = "fashion-mnist", data_dir, text, device = "cpu", runs_dir, json;
  int epochs = 1;
  int64_t batch_size = 2000, grain = 250;
};

using Words = std::vector<std::string>;

// A run: a command, which keeps its run under this name.
struct LaidOut {
  std::string name;
  std::string folder;
  Words words;
};

struct BitsResult {
  LaidOut run;
  EpochMetrics last;
  double seconds = 0;
};

// The folder of the runs: the folder that the user asked for, or a temporary one, which is removed unless somebody
// keeps it or a run fails.
class BitsFolder {
 public:
  explicit BitsFolder(const std::string& asked) : path_(asked), keeps_(!asked.empty()) {
    if (keeps_) {
      if (const auto error = io::make_folders(path_))
        throw Error("--runs-dir " + asked + ": cannot be made: " + error.message(), {Error::file});
      return;
    }
    std::string name = (fs::temp_directory_path() / "lockstep-bits-XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr)
      throw Error("cannot make the folder " + name + ": " + io::reason(errno), {Error::file});
    path_ = name;
  }
  ~BitsFolder() {
    std::error_code ignored;
    if (!keeps_ && std::uncaught_exceptions() == 0) fs::remove_all(path_, ignored);
  }
  BitsFolder(const BitsFolder&) = delete;
  BitsFolder& operator=(const BitsFolder&) = delete;

  const fs::path& path() const { return path_; }
  void keep() { keeps_ = true; }

 private:
  fs::path path_;
  bool keeps_;
};

// The program stands beside this one.
std::string lockstep_program() {
  std::error_code error;
  const auto itself = fs::read_symlink("/proc/self/exe", error);
  return error ? "lockstep" : (itself.parent_path() / "lockstep").string();
}

// Makes the commands of all layouts.
class Layouts {
 public:
  Layouts(const BenchBitsFlags& flags, fs::path folder)
      : flags_(flags), folder_(std::move(folder)), program_(lockstep_program()) {}

  std::vector<LaidOut> all() const {
    std::vector<LaidOut> all;
    const auto add = [&](const std::string& name, int ranks, const Words& more = {}, const Words& launch = {}) {
      all.push_back(laid_out(name, ranks, more, launch));
    };
    const auto add_split = [&](const std::string& name, const ModelSplit& split, int processes = 1) {
      add(name, split.mesh.size() / processes, {"--config", config_of(name, split).string()},
          processes == 1 ? Words{} : Words{"-n", std::to_string(processes)});
    };
    for (int ranks = 1; ranks <= 8; ++ranks) add(plural(static_cast<size_t>(ranks), "rank"), ranks);
    const bool in_processes = torch::Device(flags_.device).is_cpu() || comm::why_no_gpu_is_shared().empty();
    if (in_processes) {
      add("2 processes", 1, {}, {"-n", "2"});
      add("3 processes", 1, {}, {"-n", "3"});
      add("2 processes, 2 ranks each", 2, {}, {"-n", "2"});
      add("3 processes, elastic", 1, {}, {"-n", "3", "--elastic"});
    }
    add("ZeRO 1, 3 ranks", 3, {"--zero-stage", "1"});
    add("ZeRO 2, 2 ranks", 2, {"--zero-stage", "2"});
    add("ZeRO 3, 5 ranks", 5, {"--zero-stage", "3"});
    if (in_processes) add("ZeRO 3, 3 processes", 1, {"--zero-stage", "3"}, {"-n", "3"});
    add("ZeRO 3, accumulate 2", 3, {"--zero-stage", "3", "--accumulate", "2"});
    add("accumulate 2", 2, {"--accumulate", "2"});
    add("balance 2:1", 2, {"--balance", "2,1"});
    add("balance auto", 3, {"--balance", "auto"});
    add_split("pipeline of 2", {.mesh = {.pipeline = 2}});
    add_split("pipeline of 2, gpipe", {.mesh = {.pipeline = 2}, .schedule = PipelineSchedule::gpipe});
    add_split("2 pipelines of 2", {.mesh = {.data = 2, .pipeline = 2}});
    if (in_processes) add_split("2 pipelines of 2, 4 processes", {.mesh = {.data = 2, .pipeline = 2}}, 4);
    for (auto& run : stopped_and_gone_on()) all.push_back(std::move(run));
    return all;
  }

 private:
  static std::string folder_of(const std::string& name) {
    std::string folder;
    for (const char c : name) {
      const bool plain = std::isalnum(static_cast<unsigned char>(c));
      if (plain || !folder.ends_with('-')) folder += plain ? c : '-';
    }
    return folder;
  }

  // `ranks` is the number in each process. `launch` has the flags of lockstep launch, for several processes.
  LaidOut laid_out(const std::string& name, int ranks, const Words& more, const Words& launch = {}) const {
    const std::string folder = folder_of(name);
    Words words{program_};
    if (!launch.empty()) {
      words.push_back("launch");
      words.insert(words.end(), launch.begin(), launch.end());
      words.push_back(program_);
    }
    words.insert(words.end(), {"train", "--runs-dir", folder_.string(), "--name", folder, "--progress", "none",
                               "--devices", std::to_string(ranks) + "x" + flags_.device});
    const bool resumes = std::find(more.begin(), more.end(), "--resume") != more.end();
    if (!resumes) add_settings(words);
    words.insert(words.end(), more.begin(), more.end());
    return {name, folder, words};
  }

  void add_settings(Words& words) const {
    const ModelOptions unchanged;
    const auto add = [&](const char* flag, const std::string& value, bool is_default = false) {
      if (!is_default) words.insert(words.end(), {flag, value});
    };
    add("--model", flags_.model.name);
    add("--width", format("%.17g", flags_.model.width), flags_.model.width == unchanged.width);
    add("--image-size", std::to_string(flags_.model.image_size), flags_.model.image_size == unchanged.image_size);
    add("--groups", std::to_string(flags_.model.groups), flags_.model.groups == unchanged.groups);
    add("--dropout", format("%.17g", flags_.model.dropout), flags_.model.dropout == unchanged.dropout);
    const auto add_size = [&](const char* flag, int64_t size, int64_t otherwise) {
      add(flag, std::to_string(size), size == otherwise);
    };
    add_size("--layers", flags_.model.layers, unchanged.layers);
    add_size("--heads", flags_.model.heads, unchanged.heads);
    add_size("--embedding", flags_.model.embedding, unchanged.embedding);
    add_size("--context", flags_.model.context, unchanged.context);
    add("--residual-dropout", format("%.17g", flags_.model.residual_dropout), flags_.model.residual_dropout == 0);
    learns_text(flags_.model) ? add("--text", flags_.text) : add("--data", flags_.data);
    add("--data-dir", flags_.data_dir, flags_.data_dir.empty());
    add("--epochs", std::to_string(flags_.epochs));
    add("--batch-size", std::to_string(flags_.batch_size));
    add("--grain", std::to_string(flags_.grain));
    add("--momentum", "0.9");  // so that the optimizer has a state
    add("--lr", "0.02");
  }

  // It takes a configuration, since no flag of lockstep train is a mesh.
  fs::path config_of(const std::string& name, const ModelSplit& split) const {
    TrainOptions options;
    options.devices.assign(static_cast<size_t>(split.mesh.size()), torch::kCPU);
    options.way = SplitNetwork{split};
    const auto file = folder_ / (folder_of(name) + ".json");
    std::ofstream out(file);
    if (!(out << to_json(options)).flush()) throw Error("cannot write '" + file.string() + "'", {Error::file});
    return file;
  }

  // Trains on 3 ranks, goes on from a step of that on 7, and from a later step of that on 2.
  std::vector<LaidOut> stopped_and_gone_on() const {
    const auto checkpoint = [&](const std::string& run, int64_t step) {
      return (folder_ / run / kCheckpointFolder /
              format("epoch-0000-step-%06lld.safetensors", static_cast<long long>(step)))
          .string();
    };
    std::vector<LaidOut> runs;
    const Words keep = {"--checkpoint-every", "1", "--keep-last", "1000000"};
    runs.push_back(laid_out("3 ranks, checkpoints", 3, keep));
    runs.push_back(laid_out("3 to 7 ranks", 7, {"--resume", checkpoint(runs[0].folder, 1)}));
    runs.push_back(laid_out("3 to 7 to 2 ranks", 2, {"--resume", checkpoint(runs[1].folder, 2)}));
    return runs;
  }

  const BenchBitsFlags& flags_;
  const fs::path folder_;
  const std::string program_;
};

std::string command_of(const LaidOut& run) {
  std::string text;
  for (const auto& word : run.words) text += (text.empty() ? "" : " ") + (word == run.words[0] ? "lockstep" : word);
  return text;
}

BitsResult result_of(const LaidOut& run, const fs::path& folder) {
  const auto start = std::chrono::steady_clock::now();
  run_program(run.words, std::chrono::hours(24));
  return {run, read_metrics(folder / run.folder / kMetricsFile).back(), seconds_since(start)};
}

bool same_bits(const BitsResult& a, const BitsResult& b) {
  return a.last.weights == b.last.weights &&
         std::bit_cast<uint64_t>(a.last.train_loss) == std::bit_cast<uint64_t>(b.last.train_loss);
}

std::string row_of(const BitsResult& result, bool same) {
  return format("  %-25s  %s  %.17g  %.1f s%s\n", result.run.name.c_str(), result.last.weights.c_str(),
                result.last.train_loss, result.seconds, same ? "" : "  DIFFERS") +
         "      " + command_of(result.run) + "\n";
}

void write_bits(const BenchBitsFlags& flags, const std::vector<BitsResult>& results, bool all_same) {
  nlohmann::ordered_json json;
  json["model"] = to_string(flags.model);
  json["data"] = flags.text.empty() ? flags.data : flags.text;
  json["epochs"] = flags.epochs;
  json["batch_size"] = flags.batch_size;
  json["grain"] = flags.grain;
  json["same"] = all_same;
  for (const auto& result : results) {
    json["layouts"].push_back({{"layout", result.run.name},
                               {"weights", result.last.weights},
                               {"train_loss", result.last.train_loss},
                               {"test_accuracy", result.last.test_accuracy},
                               {"seconds", result.seconds},
                               {"command", command_of(result.run)}});
  }
  write_json(flags.json, "bits", {torch::Device(flags.device)}, json);
}

int bits_command(const BenchBitsFlags& flags, Output& output) {
  check_text_flag(flags.model, flags.text);
  BitsFolder folder(flags.runs_dir);
  const auto runs = Layouts(flags, folder.path()).all();
  output.print(format("%s on %s, %s, batches of %lld in grains of %lld: weights, train loss, seconds, command\n\n",
                      to_string(flags.model).c_str(), (flags.text.empty() ? flags.data : flags.text).c_str(),
                      plural(static_cast<size_t>(flags.epochs), "epoch").c_str(),
                      static_cast<long long>(flags.batch_size), static_cast<long long>(flags.grain)));
  std::vector<BitsResult> results;
  bool all_same = true;
  for (const auto& run : runs) {
    try {
      results.push_back(result_of(run, folder.path()));
    } catch (const Error& error) {
      throw Error(
          run.name + ": " + command_of(run) + ": " + error.what() + "\nthe runs are in " + folder.path().string(),
          error.data());
    }
    const bool same = same_bits(results.back(), results.front());
    all_same = all_same && same;
    output.print(row_of(results.back(), same));
  }
  write_bits(flags, results, all_same);
  if (all_same) {
    output.print("\nthe same bits on all of them\n");
    return 0;
  }
  folder.keep();
  output.print("\nthe bits differ; the runs are in " + folder.path().string() + "\n");
  return 1;
}

}  // namespace

Command add_bench_bits(CLI::App& bench) {
  CLI::App* const app = bench.add_subcommand("bits", "Compare the bits of one run on every layout of its ranks.");
  app->footer(bench_bits_explanation);
  const auto flags = std::make_shared<BenchBitsFlags>();
  const OptionAdder add{*app};
  add_model_flags(*app, flags->model);
  add("--data", flags->data, "NAME", "fashion-mnist or synthetic", flags->data);
  add("--data-dir", flags->data_dir, "DIR", "as for lockstep train");
  add("--text", flags->text, "FILE", "as for lockstep train")->check(not_empty);
  add("--device", flags->device, "NAME", "the device that all ranks share: cpu, or a GPU, as in cuda:0", flags->device)
      ->check(not_empty);
  add("--epochs", flags->epochs, "N", "passes over the training set", std::to_string(flags->epochs))
      ->check(number_between<int, 1>);
  add("--batch-size", flags->batch_size, "N", "samples per step, over all devices: at most a third of the training set",
      std::to_string(flags->batch_size))
      ->check(number_between<int64_t, 1>);
  add("--grain", flags->grain, "N", "as for lockstep train", std::to_string(flags->grain))
      ->check(number_between<int64_t, 1>);
  add("--runs-dir", flags->runs_dir, "DIR",
      "keep the runs here, so that each command can be repeated (default: a folder that is removed at the end, unless "
      "the bits differ or a run fails)")
      ->check(not_empty);
  add_json_flag(*app, flags->json);
  return {app, [flags](Output& output) { return bits_command(*flags, output); }};
}

}  // namespace lockstep::cli

// lockstep eval: computes the test accuracy of a kept run, or its perplexity, on several devices at once.
#include <lockstep/devices/device_info.hpp>
#include <lockstep/ranks/rank.hpp>
#include <lockstep/trainer/trainer.hpp>

#include <memory>
#include <optional>
#include <string>

#include "commands.hpp"
#include "common_flags.hpp"
#include "crowded_cores.hpp"
#include "flag_checks.hpp"
#include "option_flags.hpp"
#include "text.hpp"
#include "usage.hpp"

namespace lockstep::cli {

namespace {

const char* const eval_examples =
    "Examples:\n"
    "  lockstep eval runs/big-batch\n"
    "      The run's test accuracy, on every GPU, or else on every CPU core.\n"
    "  lockstep eval runs/big-batch --devices 3xcpu\n"
    "      The same number from three ranks: every sample counts once, however they\n"
    "      are split.\n"
    "\n"
    "As processes: lockstep launch, mpirun, srun, torchrun --no-python.\n";

struct EvalFlags {
  std::string run_dir, data_dir, text;
  std::optional<std::string> devices;
  EvalOptions options;
};

int eval_command(const EvalFlags& flags, Output& output) {
  EvalOptions options = flags.options;
  options.devices = devices_from(flags.devices);
  if (!flags.data_dir.empty()) options.data = FashionMnist{flags.data_dir};
  if (!flags.text.empty()) options.data = TextFile{flags.text};
  const bool speaks = this_process().index == 0;  // only one process of a launcher prints
  if (const auto crowd = text_of_crowded_cores(options.devices); speaks && !crowd.empty()) print_warning(crowd);
  const EvalResult result = evaluate_run(flags.run_dir, options);
  if (!speaks) return 0;
  const bool synthetic = result.source.rfind("synthetic", 0) == 0;
  output.print(
      (result.counts_answers
           ? format("test acc: %.4f (%lld of %lld correct)", result.accuracy(), static_cast<long long>(result.correct),
                    static_cast<long long>(result.total))
           : format("perplexity: %.4f (%lld sequences)", result.perplexity, static_cast<long long>(result.total))) +
      format(", loss %.4f, weights %s, on ", result.loss, result.weights.c_str()) + to_string(result.devices) +
      (synthetic ? " (synthetic data)" : "") + "\n");
  return 0;
}

}  // namespace

Command add_eval(CLI::App& program) {
  CLI::App* const app =
      program.add_subcommand("eval", "Compute a kept run's test accuracy, or perplexity, on several devices.");
  app->footer(eval_examples);
  const auto flags = std::make_shared<EvalFlags>();
  app->add_option("RUN_DIR", flags->run_dir, "folder of the run, as lockstep train made it")
      ->required()
      ->group("Arguments")
      ->check([](const std::string& text) { return text.empty() ? "it is empty; name the folder of a run" : ""; });
  add_devices_flag(*app, flags->devices);
  const OptionAdder add{*app};
  auto* const data_dir =
      add("--data-dir", flags->data_dir, "DIR", "folder of the IDX files (default: as the run had it)");
  data_dir->check(not_empty);
  add("--text", flags->text, "FILE", "the text of a run of gpt (default: where the run had it)")
      ->check(not_empty)
      ->excludes(data_dir);
  add("--batch-size", flags->options.batch_size, "N",
      "samples per step, over all devices together; does not change the result",
      std::to_string(flags->options.batch_size))
      ->check(number_between<int64_t, 1>);
  add_threads_flag(*app, flags->options.threads_per_rank);
  return {app, [flags](Output& output) { return eval_command(*flags, output); }};
}

}  // namespace lockstep::cli

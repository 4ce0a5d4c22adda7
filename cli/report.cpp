// lockstep report: makes one HTML page of one or several runs, to compare them in a browser.
#include <lockstep/trainer/report.hpp>

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "add_option.hpp"
#include "commands.hpp"
#include "flag_checks.hpp"

namespace lockstep::cli {

namespace {

const char* const report_examples =
    "Examples:\n"
    "  lockstep report runs/a runs/b\n"
    "      Writes report.html: two runs beside each other, and where they differ.\n"
    "  lockstep report runs --output all.html\n"
    "      All runs of a folder, such as those of a sweep.\n"
    "\n"
    "The page needs no network. It shows curves, where the time went on each rank, the\n"
    "split, a traced step, and the settings. A run's own page is in its folder.\n";

struct ReportFlags {
  std::vector<std::string> run_dirs;
  std::string output = "report.html";
};

int report_command(const ReportFlags& flags, Output& output) {
  write_report(flags.output, {flags.run_dirs.begin(), flags.run_dirs.end()});
  output.print(flags.output + "\n");
  return 0;
}

}  // namespace

Command add_report(CLI::App& program) {
  CLI::App* const app = program.add_subcommand("report", "Make a page of runs, to compare them in a browser.");
  app->footer(report_examples);
  const auto flags = std::make_shared<ReportFlags>();
  app->add_option("RUN_DIR", flags->run_dirs, "folders of runs, or of a sweep; also of runs that still train")
      ->required()
      ->group("Arguments")
      ->check(not_empty);
  OptionAdder{*app}("--output", flags->output, "FILE", "the file to write", flags->output)->check(not_empty);
  return {app, [flags](Output& output) { return report_command(*flags, output); }};
}

}  // namespace lockstep::cli

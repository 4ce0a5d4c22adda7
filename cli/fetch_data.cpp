// lockstep fetch-data: downloads Fashion-MNIST to where `lockstep train` looks for it.
#include <lockstep/base/error.hpp>
#include <lockstep/data/data.hpp>
#include <lockstep/data/fetch_data.hpp>

#include <chrono>
#include <filesystem>
#include <memory>
#include <string>

#include "add_option.hpp"
#include "commands.hpp"
#include "flag_checks.hpp"
#include "progress_bar.hpp"
#include "stop_signals.hpp"
#include "terminal.hpp"
#include "text.hpp"

namespace lockstep::cli {

namespace {

const char* const fetch_data_examples =
    "Examples:\n"
    "  lockstep fetch-data\n"
    "      Four files, 31 MB, where lockstep train finds them by itself.\n"
    "  lockstep fetch-data --dir data --url https://example.org/fashion-mnist\n"
    "      From a mirror into a folder; then: lockstep train --data-dir data\n";

struct FetchDataFlags {
  std::string dir, url;
};

// Shows a bar per file on a terminal. Elsewhere it prints only the last line.
class DownloadReport {
 public:
  explicit DownloadReport(Output& output) : output_(output), live_(output, can_redraw(output.fd())) {}

  void show(const FetchProgress& progress) {
    const auto now = Clock::now();
    if (progress.file != file_) {
      file_ = progress.file;
      begin_ = now;
    } else if (now - drawn_ < std::chrono::milliseconds(100) && progress.done != progress.total) {
      return;
    }
    drawn_ = now;
    live_.show({.label = file_,
                .done = progress.done,
                .total = progress.total,
                .seconds = std::chrono::duration<double>(now - begin_).count(),
                .unit = Unit::bytes});
  }

  void finished(const std::filesystem::path& dir) {
    live_.clear();
    output_.print("Fashion-MNIST is in " + dir.string() + "\n");
  }

 private:
  using Clock = std::chrono::steady_clock;

  Output& output_;
  LiveLine live_;
  std::string file_;
  Clock::time_point begin_, drawn_;
};

std::filesystem::path folder(const FetchDataFlags& flags) {
  if (!flags.dir.empty()) return std::filesystem::absolute(flags.dir);
  const auto place = fashion_mnist_download_place();
  if (place.empty()) throw Error("there is no home folder to put the data into: HOME is not set; use --dir DIR");
  return place;
}

int fetch_data_command(const FetchDataFlags& flags, Output& output) {
  const auto dir = folder(flags);
  StopOnSignals signals(says_that_it_stops());
  const OutputAfterStop after_stop(output, signals.token());
  DownloadReport report(output);
  FetchOptions options;
  if (!flags.url.empty()) options.base_urls = {flags.url};
  options.on_progress = [&](const FetchProgress& progress) { report.show(progress); };
  options.stop = signals.token();
  try {
    fetch_fashion_mnist(dir, options);
  } catch (const Error&) {
    if (signals.received() == 0) throw;
    return 128 + signals.received();  // complete files stay, and the next call goes on from there
  }
  report.finished(dir);
  return 0;
}

}  // namespace

Command add_fetch_data(CLI::App& program) {
  CLI::App* const app = program.add_subcommand("fetch-data", "Download Fashion-MNIST and verify its checksums.");
  app->footer(fetch_data_examples);
  const auto flags = std::make_shared<FetchDataFlags>();
  const OptionAdder add{*app};
  add("--dir", flags->dir, "DIR", "folder for the files; those that are complete are not downloaded again",
      fashion_mnist_download_place().string())
      ->check(not_empty);
  add("--url", flags->url, "BASE", "folder of the four .gz files, http(s):// or file:// (default: the data set's own)")
      ->check(not_empty);
  return {app, [flags](Output& output) { return fetch_data_command(*flags, output); }};
}

}  // namespace lockstep::cli

#include "command_line.hpp"

#include <ATen/Context.h>
#include <c10/util/Exception.h>
#include <fcntl.h>
#include <unistd.h>
#include <CLI/CLI.hpp>
#include <lockstep/base/error.hpp>
#include <lockstep/devices/keep_freed_memory.hpp>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <exception>
#include <memory>
#include <new>
#include <string>
#include <string_view>
#include <vector>

#include "base/exception_text.hpp"
#include "base/libtorch_log.hpp"
#include "commands.hpp"
#include "devices/cpu_cores.hpp"
#include "help.hpp"
#include "io/reason.hpp"
#include "option_flags.hpp"
#include "output.hpp"
#include "text.hpp"
#include "usage.hpp"

namespace lockstep::cli {
namespace {

constexpr int failed = 1;

// The next file that is opened gets the number of a closed standard descriptor, and would get its output too.
void open_closed_standard_descriptors() {
  for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (fcntl(fd, F_GETFD) < 0) open("/dev/null", O_RDWR);  // takes the lowest number that is free
  }
}

void complain(const CommandLine& line, const std::string& text) {
  Output(STDERR_FILENO).print(line.name + ": " + with_flags(without_call_stacks(text)) + "\n");
}

// Runs the chosen command.
int run_chosen(const CommandLine& line, const std::vector<const char*>& words, Output& output) {
  CLI::App program(line.description, line.name);
  program.formatter(std::make_shared<Help>());
  program.footer(line.footer);
  program.set_help_flag("-h,--help", "print this help and exit");
  program.set_version_flag("--version", line.name + " " + version() + " (LibTorch " + torch_version() + ")",
                           "print the version and exit");
  program.require_subcommand(0, 1);
  const std::vector<Command> commands = line.add_commands(program);
  const std::vector<std::string> given(words.begin() + 1, words.end());
  const auto chosen = [&] {
    return std::find_if(commands.begin(), commands.end(), [](const Command& command) { return command.app->parsed(); });
  };
  try {
    program.parse(static_cast<int>(words.size()), words.data());
  } catch (const CLI::ParseError& error) {
    // A user may ask for help or the version beside a word that is unknown.
    if (dynamic_cast<const CLI::Success*>(&error) == nullptr || !program.remaining().empty()) {
      complain(line, explain(program, error, given) + "\n" + which_help(program));
      return kWrongUsage;
    }
    const bool all = dynamic_cast<const CLI::CallForAllHelp*>(&error) != nullptr;
    const bool is_version = dynamic_cast<const CLI::CallForVersion*>(&error) != nullptr;
    output.print(is_version ? std::string(error.what()) + "\n"
                            : program.help("", all ? CLI::AppFormatMode::All : CLI::AppFormatMode::Normal));
    return 0;
  }
  if (chosen() == commands.end()) {
    output.print(program.help());
    return 0;
  }
  try {
    return chosen()->work(output);
  } catch (const UsageError& error) {
    complain(line, std::string(error.what()) + "\n" + which_help(program));
    return kWrongUsage;
  }
}

// Makes "lockstep help train" the same as "lockstep train --help".
std::vector<const char*> with_help_as_option(int argc, char** argv) {
  std::vector<const char*> words(argv, argv + argc);
  if (words.size() < 2 || std::string_view(words[1]) != "help") return words;
  words.erase(words.begin() + 1);
  words.push_back("--help");
  return words;
}

int run_and_report_errors(const CommandLine& line, const std::vector<const char*>& words, Output& output) {
  try {
    return run_chosen(line, words, output);
  } catch (const lockstep::Error& error) {
    complain(line, std::string("error: ") + error.what());
  } catch (const std::bad_alloc&) {
    complain(line, "error: " + exception_text(std::current_exception()));
  } catch (const c10::Error&) {
    const auto error = std::current_exception();
    const bool is_the_machines = data_of(error).cause == lockstep::Error::machine;
    complain(line, (is_the_machines ? "error: " : "error in LibTorch, please report it: ") + exception_text(error));
  } catch (const std::exception&) {
    const std::string text = exception_text(std::current_exception());
    complain(line, "error that should not happen, please report it: " + text);
  }
  return failed;
}

}  // namespace

int run_command_line(const CommandLine& line, int argc, char** argv) {
  open_closed_standard_descriptors();
  keep_freed_memory();
  at::globalContext().setFlushDenormal(true);  // Threads inherit it (docs/decisions/0085).
  const FreeOfOpenMp free_of_openmp;           // for the processes and threads that start here
  log_errors_only();
  std::signal(SIGPIPE, SIG_IGN);  // a reader that goes away is an error to handle, not a reason to die in mid-epoch
  Output output(STDOUT_FILENO);
  const int code = run_and_report_errors(line, with_help_as_option(argc, argv), output);
  output.finish();
  if (!output.failed()) return code;
  if (output.error() == EPIPE) return 128 + SIGPIPE;  // the code that a shell reports, and no message
  complain(line, "error: cannot write to the standard output: " + io::reason(output.error()));
  return failed;
}

}  // namespace lockstep::cli

// The program lockstep: reads the command line, runs the command, and turns what happens into an exit code.
#include <c10/util/Exception.h>
#include <malloc.h>
#include <unistd.h>
#include <CLI/CLI.hpp>
#include <lockstep/error.hpp>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "commands.hpp"
#include "help.hpp"
#include "output.hpp"
#include "said.hpp"

namespace {

using lockstep::cli::Command;
using lockstep::cli::Output;

constexpr int failed = 1;
constexpr int wrong_usage = 2;

const char* const footer =
    "Examples:\n"
    "  lockstep train --devices 2\n"
    "  lockstep train --help\n"
    "\n"
    "Exit codes: 0 done; 1 an error; 2 wrong usage; 130 stopped by Ctrl-C, 143 by\n"
    "SIGTERM; 141 nobody reads the output any more.\n";

// The activations of a training step are large blocks that live for milliseconds. By default the C library gives them
// back to the kernel when they are freed, and at every step the kernel clears the pages again, while the rank threads
// wait for each other in its page fault handler: up to a third of the time. With these limits freed blocks stay with
// the process. The last one is for threads, whose memory comes in pieces of at most 64 MB that are unmapped when all of
// a piece is free, unless so much must stay.
void keep_freed_memory() {
#ifdef __GLIBC__
  mallopt(M_MMAP_THRESHOLD, 32 << 20);  // the most that it takes
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
  mallopt(M_TOP_PAD, 64 << 20);
#endif
}

void complain(const std::string& text) {
  const std::string rest = lockstep::cli::not_yet_said(text);
  if (!rest.empty()) Output(STDERR_FILENO).print("lockstep: " + rest + "\n");
}

// Runs the chosen command. A usage error also names the help that would have prevented it.
int run(int argc, char** argv, Output& output) {
  CLI::App program("lockstep trains neural networks over several devices, on LibTorch.", "lockstep");
  program.formatter(std::make_shared<lockstep::cli::Help>());
  program.footer(footer);
  program.set_help_flag("-h,--help", "print this help and exit");
  program.set_version_flag(
      "--version", "lockstep " + lockstep::cli::version() + " (LibTorch " + lockstep::cli::torch_version() + ")",
      "print the version and exit");
  program.require_subcommand(0, 1);
  const std::vector<Command> commands = {lockstep::cli::add_train(program),   lockstep::cli::add_eval(program),
                                         lockstep::cli::add_devices(program), lockstep::cli::add_fetch_data(program),
                                         lockstep::cli::add_bench(program),   lockstep::cli::add_launch(program)};

  const auto chosen = [&] {
    return std::find_if(commands.begin(), commands.end(), [](const Command& command) { return command.app->parsed(); });
  };
  try {
    program.parse(argc, argv);
  } catch (const CLI::CallForVersion& version) {
    output.print(std::string(version.what()) + "\n");
    return 0;
  } catch (const CLI::Success&) {
    output.print(program.help());
    return 0;
  } catch (const CLI::ParseError& error) {
    std::string command;
    if (chosen() != commands.end()) {
      command = " " + chosen()->app->get_name();
      for (const auto* part : chosen()->app->get_subcommands()) command += " " + part->get_name();
    }
    complain(std::string(error.what()) + "\nlockstep" + command + " --help shows what there is.");
    return wrong_usage;
  }
  if (chosen() == commands.end()) {
    output.print(program.help());
    return 0;
  }
  return chosen()->work(output);
}

int run_and_report_errors(int argc, char** argv, Output& output) {
  try {
    return run(argc, argv, output);
  } catch (const lockstep::Error& error) {
    complain(std::string("error: ") + error.what());
  } catch (const std::bad_alloc&) {
    complain("error: out of memory");
  } catch (const c10::Error& error) {
    complain(std::string("error in LibTorch, please report it: ") + error.what_without_backtrace());
  } catch (const std::exception& error) {
    complain(std::string("error that should not happen, please report it: ") + error.what());
  }
  return failed;
}

}  // namespace

int main(int argc, char** argv) {
  keep_freed_memory();
  std::signal(SIGPIPE, SIG_IGN);  // a reader that goes away is an error to handle, not a reason to die in mid-epoch
  Output output(STDOUT_FILENO);
  const int code = run_and_report_errors(argc, argv, output);
  if (!output.failed()) return code;
  if (output.error() == EPIPE) return 128 + SIGPIPE;  // as a shell reports it, and as quietly
  complain(std::string("error: cannot write to the standard output: ") + std::strerror(output.error()));
  return failed;
}

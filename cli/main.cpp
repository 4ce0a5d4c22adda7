#include <cstdio>
#include <cstdlib>

#include "command_line.hpp"

int main(int argc, char** argv) {
  const int code = lockstep::cli::run_command_line(argc, argv);
  std::fflush(nullptr);
  // LibTorch would take back its operators one by one, for a tenth of a second. Here nothing waits for that.
  std::quick_exit(code);
}

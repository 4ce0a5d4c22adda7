#include "command_line.hpp"
#include "end_process.hpp"

int main(int argc, char** argv) {
  lockstep::end_process(lockstep::cli::run_command_line(argc, argv));
}

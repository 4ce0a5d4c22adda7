#include "end_process.hpp"
#include "lockstep.hpp"

int main(int argc, char** argv) {
  lockstep::end_process(lockstep::cli::run_lockstep(argc, argv));
}

#include "bench.hpp"
#include "cli/end_process.hpp"

int main(int argc, char** argv) {
  lockstep::end_process(lockstep::cli::run_bench(argc, argv));
}

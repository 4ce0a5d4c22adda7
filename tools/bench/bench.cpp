#include "bench.hpp"

#include <lockstep/base/error.hpp>
#include <lockstep/ranks/rank.hpp>

#include <utility>
#include <vector>

#include "benches.hpp"
#include "cli/command_line.hpp"

namespace lockstep::cli {

namespace {

const char* const footer =
    "Examples:\n"
    "  lockstep-bench allreduce --devices 2 --peers\n"
    "      Sums between two ranks, beside memcpy, Gloo and Open MPI.\n"
    "  lockstep-bench bits --data synthetic\n"
    "      One run on every layout of ranks: the same bits?\n"
    "  lockstep-bench compare --model lenet --devices 2\n"
    "      What each way to split a network costs.\n"
    "  lockstep-bench grain --devices 2xcpu\n"
    "      What these same bits cost.\n"
    "  lockstep-bench step --devices 2\n"
    "      What DataParallel adds to a step.\n"
    "  lockstep-bench overlap --devices 2 --json overlap.json\n"
    "      How much of the gradients' reduction hides behind backward.\n"
    "  lockstep-bench server --devices 3xcpu\n"
    "      A parameter server's modes beside allreduce.\n";

std::vector<Command> add_benches(CLI::App& program) {
  std::vector<Command> benches = {add_bench_allreduce(program), add_bench_bits(program),    add_bench_compare(program),
                                  add_bench_grain(program),     add_bench_overlap(program), add_bench_server(program),
                                  add_bench_step(program)};
  for (Command& bench : benches) {
    bench.work = [work = std::move(bench.work)](Output& output) {
      if (this_process().count > 1)
        throw Error("lockstep-bench measures the ranks of one process; start it without a launcher, with --devices");
      return work(output);
    };
  }
  return benches;
}

}  // namespace

int run_bench(int argc, char** argv) {
  return run_command_line(
      {"lockstep-bench", "Measures what lockstep itself costs on this machine.", footer, add_benches}, argc, argv);
}

}  // namespace lockstep::cli

// lockstep bench: what lockstep itself costs, measured on this machine.
#include <lockstep/base/error.hpp>
#include <lockstep/ranks/rank.hpp>

#include "bench_allreduce.hpp"
#include "bench_bits.hpp"
#include "bench_grain.hpp"
#include "bench_overlap.hpp"
#include "bench_server.hpp"
#include "bench_step.hpp"
#include "commands.hpp"

#include <algorithm>
#include <vector>

namespace lockstep::cli {

namespace {

const char* const bench_examples =
    "Examples:\n"
    "  lockstep bench allreduce --devices 2 --peers\n"
    "      Sums between two ranks, beside memcpy, Gloo and Open MPI.\n"
    "  lockstep bench bits --data synthetic\n"
    "      One run on every layout of ranks: the same bits?\n"
    "  lockstep bench grain --devices 2xcpu\n"
    "      What these same bits cost.\n"
    "  lockstep bench step --devices 2\n"
    "      What DataParallel adds to a step.\n"
    "  lockstep bench overlap --devices 2 --json overlap.json\n"
    "      How much of the gradients' reduction hides behind backward.\n"
    "  lockstep bench server --devices 3xcpu\n"
    "      A parameter server's modes beside allreduce.\n";

}  // namespace

Command add_bench(CLI::App& program) {
  CLI::App* const app = program.add_subcommand("bench", "Measure what lockstep itself costs on this machine.");
  app->footer(bench_examples);
  app->require_subcommand(1);
  const std::vector<Command> benchmarks = {add_bench_allreduce(*app), add_bench_bits(*app),   add_bench_grain(*app),
                                           add_bench_overlap(*app),   add_bench_server(*app), add_bench_step(*app)};
  return {app, [benchmarks](Output& output) {
            if (this_process().count > 1) {
              throw Error("bench measures the ranks of one process; start it without a launcher, with --devices");
            }
            const auto chosen = std::find_if(benchmarks.begin(), benchmarks.end(),
                                             [](const Command& benchmark) { return benchmark.app->parsed(); });
            return chosen->work(output);
          }};
}

}  // namespace lockstep::cli

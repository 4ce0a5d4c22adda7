// The program that the process tests start several times: process_ranks SCENARIO [DEVICES [ARGUMENT]].
#include <ATen/Parallel.h>
#include <lockstep/base/error.hpp>
#include <lockstep/ranks/rank.hpp>

#include <functional>
#include <iostream>
#include <map>

#include "scenarios.hpp"
#include "support/error_data.hpp"

namespace {

std::string name() {
  try {
    return "process " + std::to_string(lockstep::this_process().index) + ": ";
  } catch (const lockstep::Error&) {  // the environment does not say
    return "a process: ";
  }
}

}  // namespace

int scenarios::run_scenario(int argc, char** argv) {
  const std::map<std::string, std::function<void(const scenarios::Setup&)>> all = {
      {"collectives", scenarios::collectives},
      {"training", scenarios::training},
      {"fits", scenarios::fits},
      {"own_loop", scenarios::own_loop},
      {"random_nets", scenarios::random_nets},
      {"runs", scenarios::runs},
      {"connects", scenarios::connects},
      {"lives", scenarios::lives},
      {"throws", scenarios::throws},
      {"dies", scenarios::dies},
      {"dies_in_a_backward", scenarios::dies_in_a_backward},
      {"dies_in_an_evaluation", scenarios::dies_in_an_evaluation},
      {"runs_out_of_memory", scenarios::runs_out_of_memory},
      {"serves", scenarios::serves},
      {"is_asked_to_stop", scenarios::is_asked_to_stop},
      {"has_a_stranger", scenarios::has_a_stranger},
      {"freezes", scenarios::freezes},
      {"sleeps", scenarios::sleeps},
      {"has_a_batch_fewer", scenarios::has_a_batch_fewer},
      {"waits_crosswise", scenarios::waits_crosswise},
      {"parts_do_not_fit", scenarios::parts_do_not_fit},
      {"grains_of_others", scenarios::grains_of_others},
      {"message_fails", scenarios::message_fails},
      {"dies_while_it_receives", scenarios::dies_while_it_receives},
      {"reads_on", scenarios::reads_on},
      {"returns_early", scenarios::returns_early},
      {"asks_in_vain", scenarios::asks_in_vain},
      {"shares_memory", scenarios::shares_memory},
      {"calls_otherwise", scenarios::calls_otherwise},
      {"calls_otherwise_in_a_group", scenarios::calls_otherwise_in_a_group},
      {"is_configured_otherwise", scenarios::is_configured_otherwise}};
  at::set_num_threads(1);
  try {
    const auto scenario = all.at(argc > 1 ? argv[1] : "");
    scenario({lockstep::parse_devices(argc > 2 ? argv[2] : "cpu"), argc > 3 ? argv[3] : ""});
    std::cout << name() + "ok\n" << std::flush;
    return 0;
  } catch (const lockstep::Error& error) {
    std::cerr << name() + error.what() + "\n" + name() + "cause " + lockstep::data_text(error.data()) + "\n";
    return 3;
  } catch (const std::exception& error) {
    std::cerr << std::string("not an Error: ") + error.what() + "\n";
    return 4;
  }
}

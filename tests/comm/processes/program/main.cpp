#include "cli/end_process.hpp"
#include "scenarios.hpp"

int main(int argc, char** argv) {
  lockstep::end_process(scenarios::run_scenario(argc, argv));
}

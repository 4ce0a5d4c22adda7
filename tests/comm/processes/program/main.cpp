#include <cstdlib>
#include <iostream>

#include "scenarios.hpp"

int main(int argc, char** argv) {
  const int code = scenarios::run_scenario(argc, argv);
  std::cout.flush();
  std::quick_exit(code);  // as the program lockstep ends, and why: cli/main.cpp
}

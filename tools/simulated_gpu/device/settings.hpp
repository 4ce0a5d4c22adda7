// Reads the settings of the simulated devices from the environment.
#pragma once

namespace simulated {

struct Settings {
  int devices;   // SIMULATED_DEVICES, 4 if it is not set
  int delay_us;  // SIMULATED_DELAY_US: each task waits for a random time below this
};

const Settings& settings();

}  // namespace simulated

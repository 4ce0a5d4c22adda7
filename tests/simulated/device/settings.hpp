// What the environment says about the simulated devices.
#pragma once

namespace simulated {

struct Settings {
  int devices;              // SIMULATED_DEVICES, 4 if it is not set
  int delay_us;             // SIMULATED_DELAY_US: each task waits for a random time below this
  bool takes_host_tensors;  // SIMULATED_TAKES_HOST_TENSORS=1: an operator copies host tensors that come with device
                            // tensors
};

const Settings& settings();

}  // namespace simulated

// check_devices: refuses a device list with which no run could begin.
#pragma once

#include <lockstep/devices/devices.hpp>

namespace lockstep {

// Throws Error unless a run could have one rank per entry: there is an entry, and all devices exist and have one type.
void check_devices(const Devices& devices);

}  // namespace lockstep

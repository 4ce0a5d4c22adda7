// Checks a device list before a run begins.
#pragma once

#include <lockstep/devices/devices.hpp>

namespace lockstep {

// Throws Error unless a run could have one rank per entry: there is an entry, and all devices exist and have one type.
void check_devices(const Devices& devices);

// Tells whether one GPU is in the list twice. Give it a list that check_devices() takes.
bool share_a_gpu(const Devices& devices);

}  // namespace lockstep

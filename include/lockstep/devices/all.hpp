// devices: the devices that run the tensors, with their memory and precision.
//   autocast           mixed precision for one scope of one thread
//   devices            which devices the machine has, and how a user names them
//   keep_freed_memory  lets a process keep the memory that it frees: faster on CPUs
//   memory_format      gives a module's weights a layout in memory
// Not in lockstep.hpp:
//   device_info        a GPU's name and memory, and a list of devices as text
#pragma once

#include <lockstep/devices/autocast.hpp>
#include <lockstep/devices/devices.hpp>
#include <lockstep/devices/keep_freed_memory.hpp>
#include <lockstep/devices/memory_format.hpp>

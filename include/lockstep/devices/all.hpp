// devices: what runs the tensors: CPU cores, GPUs, memory, precision.
//   autocast  mixed precision for one scope of one thread
//   devices   which devices the machine has, and how a user names them
#pragma once

#include <lockstep/devices/autocast.hpp>
#include <lockstep/devices/devices.hpp>

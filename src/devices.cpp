#include <lockstep/devices.hpp>

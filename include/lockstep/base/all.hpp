// base: errors, texts and clocks. Includes no other room.
//   error  lockstep::Error, the one exception type
#pragma once

#include <lockstep/base/error.hpp>

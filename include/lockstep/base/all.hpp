// base: errors, texts and clocks. Includes no other room.
//   error    lockstep::Error, the one exception type
//   version  which lockstep this is
#pragma once

#include <lockstep/base/error.hpp>
#include <lockstep/base/version.hpp>

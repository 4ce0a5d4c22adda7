// base: errors, texts and clocks. It includes no other room.
//   error            lockstep::Error, the one exception type
//   stop_on_signals  Ctrl-C and SIGTERM as a request to stop
//   version          which lockstep this is
#pragma once

#include <lockstep/base/error.hpp>
#include <lockstep/base/stop_on_signals.hpp>
#include <lockstep/base/version.hpp>

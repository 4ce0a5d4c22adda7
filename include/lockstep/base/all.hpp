// base: errors, texts and clocks. Knows nobody.
//   error  lockstep::Error, the one exception type
#pragma once

#include <lockstep/base/error.hpp>

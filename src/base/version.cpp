#include <lockstep/base/version.hpp>

namespace lockstep {

std::string version() {
  return LOCKSTEP_VERSION;
}

}  // namespace lockstep

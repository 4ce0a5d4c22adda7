#include "settings.hpp"

#include <cstdlib>

namespace simulated {
namespace {

int number_from(const char* variable, int otherwise) {
  const char* const text = std::getenv(variable);
  return text == nullptr ? otherwise : std::atoi(text);
}

}  // namespace

const Settings& settings() {
  static const Settings settings{number_from("SIMULATED_DEVICES", 4), number_from("SIMULATED_DELAY_US", 0)};
  return settings;
}

}  // namespace simulated

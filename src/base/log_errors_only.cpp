#include "log_errors_only.hpp"

#include <c10/util/Logging.h>

#include <cstdlib>

namespace lockstep {

void log_errors_only() {
  constexpr int errors = 2;
  if (std::getenv("TORCH_CPP_LOG_LEVEL") == nullptr) {
    FLAGS_caffe2_log_level = errors;
    c10::UpdateLoggingLevelsFromFlags();
  } else {
    c10::initLogging();
  }
}

}  // namespace lockstep

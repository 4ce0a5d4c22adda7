#include "libtorch_log.hpp"

#include <c10/util/Exception.h>
#include <c10/util/Logging.h>

#include <cstdlib>
#include <iostream>
#include <typeinfo>

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

void warn_as_libtorch(const std::string& text) {
  c10::WarningHandler& handler = *c10::WarningUtils::get_warning_handler();
  if (typeid(handler) == typeid(c10::WarningHandler)) {
    std::cerr << text + "\n" << std::flush;
  } else {
    c10::warn(c10::Warning(c10::UserWarning(), {__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, text,
                           /*verbatim=*/false));
  }
}

}  // namespace lockstep

#include "exception_text.hpp"

#include <c10/util/Exception.h>

#include <new>
#include <system_error>

namespace lockstep {
namespace {

// LibTorch's allocator for the CPU throws no type of its own.
bool is_of_memory(const c10::Error& error) {
  return dynamic_cast<const c10::OutOfMemoryError*>(&error) != nullptr ||
         error.msg().find("DefaultCPUAllocator: ") != std::string::npos;
}

std::string out_of_memory(const std::string& what) {
  return "out of memory" + (what.empty() ? "" : " (" + what + ")") +
         ". Less is needed with a smaller batch, with fewer ranks on this machine, or with the optimizer's state "
         "divided "
         "among the ranks (ZeRO); ulimit -v or a container may limit it";
}

}  // namespace

std::string exception_text(const std::exception_ptr& exception) {
  try {
    std::rethrow_exception(exception);
  } catch (const c10::Error& error) {
    return is_of_memory(error) ? out_of_memory(error.what_without_backtrace()) : error.what_without_backtrace();
  } catch (const std::bad_alloc&) {
    return out_of_memory("");
  } catch (const std::system_error& error) {
    const bool is_thread = error.code() == std::errc::resource_unavailable_try_again;
    return error.what() + std::string(is_thread ? ": the system makes no more threads. ulimit -u, ulimit -v or a "
                                                  "container may limit them"
                                                : "");
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "an exception of unknown type";
  }
}

}  // namespace lockstep

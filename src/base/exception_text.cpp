#include "exception_text.hpp"

#include <c10/util/Exception.h>

#include "start_thread.hpp"

#include <filesystem>
#include <ios>
#include <new>
#include <system_error>

namespace lockstep {
namespace {

std::string out_of_memory(const std::string& what, bool is_of_gpu) {
  return "out of memory" + (what.empty() ? "" : " (" + what + ")") + ". Less is needed " +
         what_needs_less_memory(is_of_gpu ? "this GPU" : "this machine") +
         (is_of_gpu ? "" : "; ulimit -v or a container may limit it");
}

// Looks at the text, since LibTorch's allocator for the CPU throws no type of its own.
bool is_of_cpu_memory(const c10::Error& error) {
  return error.msg().find("DefaultCPUAllocator: ") != std::string::npos;
}

}  // namespace

std::string what_needs_less_memory(const std::string& where) {
  return "with a smaller batch, with fewer ranks on " + where +
         ", or with the optimizer's state divided among the ranks (ZeRO, which no elastic job has)";
}

std::string exception_text(const std::exception_ptr& exception) {
  try {
    std::rethrow_exception(exception);
  } catch (const c10::OutOfMemoryError& error) {
    return out_of_memory(error.what_without_backtrace(), !is_of_cpu_memory(error));
  } catch (const c10::Error& error) {
    return is_of_cpu_memory(error) ? out_of_memory(error.what_without_backtrace(), /*is_of_gpu=*/false)
                                   : error.what_without_backtrace();
  } catch (const std::bad_alloc&) {
    return out_of_memory("", /*is_of_gpu=*/false);
  } catch (const std::system_error& error) {
    const bool lacks = error.code() == std::errc::resource_unavailable_try_again;
    return error.what() + (lacks ? std::string(". Perhaps ") + kNoMoreThreads : "");
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "an exception of unknown type";
  }
}

Error::Data data_of(const std::exception_ptr& exception) {
  try {
    std::rethrow_exception(exception);
  } catch (const Error& error) {
    return error.data();
  } catch (const c10::Error& error) {
    const bool is_machines = dynamic_cast<const c10::OutOfMemoryError*>(&error) != nullptr ||
                             dynamic_cast<const c10::DistError*>(&error) != nullptr ||
                             dynamic_cast<const c10::AcceleratorError*>(&error) != nullptr || is_of_cpu_memory(error);
    return {is_machines ? Error::machine : Error::user_code};
  } catch (const std::bad_alloc&) {
    return {Error::machine};
  } catch (const std::filesystem::filesystem_error&) {
    return {Error::file};
  } catch (const std::ios_base::failure&) {
    return {Error::user_code};
  } catch (const std::system_error&) {
    return {Error::machine};
  } catch (...) {
    return {Error::user_code};
  }
}

}  // namespace lockstep

// exception_text: says what an exception of any kind says, for an Error that wraps it. Leaves out LibTorch's
// backtraces.
#pragma once

#include <lockstep/base/error.hpp>

#include <exception>
#include <string>

namespace lockstep {

std::string exception_text(const std::exception_ptr& exception);

// The data of the Error that wraps it. It is the machine's fault if memory, threads or a connection lacked; any other
// exception that is no Error came from the caller's code.
Error::Data data_of(const std::exception_ptr& exception);

// Advice that follows "Less memory is needed". `where`: "this GPU", "this machine".
std::string what_needs_less_memory(const std::string& where);

}  // namespace lockstep

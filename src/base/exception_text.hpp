// exception_text: says what an exception of any kind says, for an Error that wraps it. Leaves out LibTorch's
// backtraces.
#pragma once

#include <lockstep/base/error.hpp>

#include <exception>
#include <string>

namespace lockstep {

std::string exception_text(const std::exception_ptr& exception);

// Gives the data of the Error that wraps `exception`. The machine is at fault if memory, threads or a connection were
// missing. A std::filesystem error is of a file. Any other exception that is no Error came from the caller's code.
Error::Data data_of(const std::exception_ptr& exception);

// Gives the advice that follows "less is needed". `where` is "this GPU" or "this machine".
std::string what_needs_less_memory(const std::string& where);

}  // namespace lockstep

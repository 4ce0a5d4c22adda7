// Sets what LibTorch logs, and passes on our warnings.
//
// LibTorch's default level warns of every connection that ends, with a call stack of twenty lines. This would bury the
// one error of ours that says which process is gone.
#pragma once

#include <string>

namespace lockstep {

// Makes LibTorch log errors alone, or what TORCH_CPP_LOG_LEVEL in the environment says.
void log_errors_only();

// Passes a warning of ours to the handler that the user has given LibTorch. LibTorch's own handler logs at a level that
// may be hidden, so in its place the text goes to stderr. Thread-safe.
void warn_as_libtorch(const std::string& text);

}  // namespace lockstep

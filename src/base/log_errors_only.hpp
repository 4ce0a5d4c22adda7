// At its default level LibTorch warns of every connection that ends, with a call stack of twenty lines. This would bury
// the one error of ours that says which process is gone.
#pragma once

namespace lockstep {

// From here on LibTorch logs errors alone, or what TORCH_CPP_LOG_LEVEL in the environment says.
void log_errors_only();

}  // namespace lockstep

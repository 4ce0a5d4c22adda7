// A stand-in for LibTorch's header of this name on simulated devices: warnings of the host's waits.
#pragma once

#include "simulated_gpu/device/reports.hpp"

namespace c10::cuda {

enum class SyncDebugMode { L_DISABLED, L_WARN };

struct WarningState {
  void set_sync_debug_mode(SyncDebugMode mode) {
    simulated::counts().warns_of_host_waits = mode == SyncDebugMode::L_WARN;
  }
};

inline WarningState warning_state() {
  return {};
}

}  // namespace c10::cuda

// Faults within NCCL, which its stand-in alone can have.
#pragma once

#include <functional>
#include <string>

namespace lockstep {

// Lets this process's NCCL call `fault` in its "init", "kernel" or "shutdown". Throws Error over real NCCL.
void plant_in_nccl(const std::string& where, std::function<void()> fault);

// Drops the stand-in's reports of kernels that an abort has ended.
void drop_reports();

}  // namespace lockstep

// Refuses what CUDA's kernels refuse and the CPU's take, in operators that lockstep calls by name
// (docs/decisions/0024).
#pragma once

#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>

#include <vector>

namespace simulated {

// Throws c10::Error, in CUDA's words, for arguments that CUDA's kernel would refuse.
void check_rules(const c10::FunctionSchema& schema, const std::vector<c10::IValue>& given);

}  // namespace simulated

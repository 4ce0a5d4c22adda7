// Pinned host memory, from which and to which copies run without the host's waiting.
#pragma once

#include <c10/core/Allocator.h>

namespace simulated {

at::Allocator* pinned_allocator();

bool is_pinned(const void* data);

}  // namespace simulated

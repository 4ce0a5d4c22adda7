// Whether the calling thread is a rank of run().
#pragma once

namespace lockstep {

bool is_rank_thread();
void set_rank_thread();  // run() calls it in each thread that it starts

}  // namespace lockstep

// DataParallelOptions: how a DataParallel averages gradients, and what the ranks divide among themselves.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace lockstep {

class CommunicationHook;
class GrainCheck;

// Says what ranks divide among themselves, where otherwise each has all (ZeRO; Rajbhandari et al. 2020, section 5,
// stages 1 to 3; PyTorch calls the last one FSDP). docs/guide/zero.md has the costs of each.
enum class Sharded {
  nothing,
  state,       // each rank has a slice of the optimizer's state
  gradients,   // each rank has a slice of the averaged gradients too
  parameters,  // and a slice of the parameters, which are gathered when an operator is about to read them
};

struct DataParallelOptions {
  int64_t bucket_bytes = 4 << 20;          // a bucket is full when it holds this many bytes of gradients
  int64_t first_bucket_bytes = 256 << 10;  // the same for the first bucket: small, so that averaging starts early
  bool overlap = true;                     // false: every bucket is averaged after backward
  // false: backward() sends nothing, and each rank keeps its own gradients, for a LocalSgd (local_sgd.hpp) or for an
  // averaging of yours.
  bool average = true;
  // Averages each bucket in its own way (communication_hook.hpp). Each rank needs its own hook, which no other
  // DataParallel uses. Null: one allreduce per bucket, of the gradients as they are.
  std::shared_ptr<CommunicationHook> hook = nullptr;
  // If it is not `nothing`, an Optimizer (optimizer.hpp) steps, and `.grad` is undefined outside of backwards, but for
  // the sums of backwards under no_sync(). With `parameters` every use of a parameter is a collective call. Use the
  // same ones in the same order on all ranks, on the thread that made the net; an Error names a rank that differs. Do
  // not shard in an elastic run (RunOptions::succession).
  Sharded sharded = Sharded::nothing;
  // Names modules, such as "layers.3", whose parameters Sharded::parameters gathers as one unit each. Other modules are
  // taken in runs of at most bucket_bytes, a sixteenth of the net and an eighth of a rank's slice of it, whichever is
  // least; but of 64 KiB in a small net. Best are units that compute one after the other, and are small beside a slice.
  std::vector<std::string> units = {};
  // Computes grains (BatchOptions::grain) again and compares them. Make it by check_arithmetic(0.01), for example
  // (lab/check_arithmetic.hpp). Each rank needs its own, and all batches need a grain. Do not use it with
  // Sharded::parameters. Null: none.
  std::shared_ptr<GrainCheck> grain_check = nullptr;
};

}  // namespace lockstep

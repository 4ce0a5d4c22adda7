// Reads and writes a ModelSplit for plans and runs' configurations: the keys mesh, schedule, stages_per_rank,
// microbatches, recompute, cuts and tensor_rule of an object.
#pragma once

#include <lockstep/layout/model_split.hpp>
#include <nlohmann/json.hpp>

#include "io/json_fields.hpp"

namespace lockstep {

nlohmann::ordered_json to_json(const ModelSplit& split);

// Reads the split. All its keys must be there; others are left for the caller. Throws Error as JsonFields does, and for
// numbers below 1.
ModelSplit split_from(JsonFields& fields);

}  // namespace lockstep

// Lets a language model write: draws byte after byte from the probabilities that the model gives.
#pragma once

#include <lockstep/trainer/task.hpp>

#include <cstdint>
#include <string>

namespace lockstep {

// So many bytes, drawn at the temperature 0.8 by a generator of this seed; they follow a line feed. `forward` takes
// tokens [1, context] and gives the logits [1, context, 256] of each next one. It is called once for each byte. The
// same logits and seed give the same text on every machine.
std::string written_text(const Task::Forward& forward, int64_t context, int64_t bytes, uint64_t seed);

}  // namespace lockstep

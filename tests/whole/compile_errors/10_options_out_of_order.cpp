// Says: declaration order
#include "probe.hpp"

void mistake(Rank& rank) {
  for (auto& part : lockstep::batches(data, {.epoch = 1, .size = 256}, rank)) part.x.zero_();
}

// Says: batches\(data, \{.size = 256, .epoch = epoch\}, rank\)
#include "probe.hpp"

void mistake(Rank& rank) {
  for (auto& part : lockstep::batches(data, 256, rank)) part.x.zero_();
}

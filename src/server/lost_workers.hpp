// Sends who was lost in a training, as messages between two ranks. A collective call would need the lost ranks;
// messages do not.
#pragma once

#include <lockstep/server/parameter_server.hpp>

#include <vector>

namespace lockstep::server {

using Works = std::vector<c10::intrusive_ptr<c10d::Work>>;

std::vector<LostWorker> as_sent(const std::vector<LostWorker>& lost);  // what receive_lost makes of it

Works send_lost(Rank& rank, const std::vector<LostWorker>& lost, int to);  // on its way: to be waited for
std::vector<LostWorker> receive_lost(Rank& rank, int from);

// Each worker once, in order, with the reason of the first list if it has one.
std::vector<LostWorker> merged(const std::vector<LostWorker>& first, const std::vector<LostWorker>& second);

}  // namespace lockstep::server

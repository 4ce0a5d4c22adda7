// A group over Gloo whose members have shown each other that they know the job's key, before anything else goes over
// it.
//
// Gloo lets everybody in, and a stranger who connects first gets a rank's place. So each two members sign what the
// other has just made up, on each connection between them. If one finds that it cannot be the other it says so in the
// store. Then all connect anew, at other ports, where nobody is heard before he is known (guests.hpp). Costs two
// messages, and three questions to the store.
#pragma once

#include "comm/group_member.hpp"
#include "comm/job_key.hpp"

#include <chrono>
#include <stop_token>
#include <string>
#include <vector>

namespace lockstep::comm {

struct ProvenPlace {
  GroupPlace group;
  std::string local_address;  // as make_gloo_group has it
  JobKey key;
  std::string name;                  // no other group of the run has it
  std::vector<std::string> members;  // for texts
  // Once this member is connected, the longest wait for each of the two messages, but 3 s at least.
  std::chrono::milliseconds silence;
};

// Connects to all other members, which must make the same call. Says who was turned away, as a warning. Throws Error:
// strangers were faster each time. Throws what make_gloo_group throws, and DistStoreError once a stop was requested.
GroupMember make_proven_group(const ProvenPlace& place, const std::stop_token& stop);

}  // namespace lockstep::comm

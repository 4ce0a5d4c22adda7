// The members of a proven group over Gloo have proven to each other that they know the job's key, before anything else
// goes over the group.
//
// Gloo lets everybody in, and a stranger who connects first gets a rank's place. So each two members sign what the
// other has just made up, on each connection between them. A member that gets a wrong signature says so in the store.
// Then all connect anew, at other ports, where nobody is heard before he is known (guests.hpp). It costs two messages,
// and three questions to the store.
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
  std::string local_address;  // the address for make_gloo_group
  JobKey key;
  std::string name;                  // no other group of the run has the same name
  std::vector<std::string> members;  // the members' names, for texts
  // The longest wait for each of the two messages once this member is connected; it is 3 s at least.
  std::chrono::milliseconds silence;
};

// Connects to all other members; call this on all of them. Warns of strangers that were turned away. Throws Error if
// strangers were faster in each try. Throws what make_gloo_group throws, and DistStoreError once a stop is requested.
GroupMember make_proven_group(const ProvenPlace& place, const std::stop_token& stop);

}  // namespace lockstep::comm

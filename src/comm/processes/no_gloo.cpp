// Stands in for gloo.cpp if Gloo's headers were not found when this build was configured.
#include <lockstep/base/error.hpp>

#include "comm/group_member.hpp"

namespace lockstep::comm {

GroupMember make_gloo_group(const GroupPlace&, const std::string&) {
  throw Error(
      "this build of lockstep has no Gloo, which CPU ranks in several processes need: install Debian's libgloo-dev "
      "(its headers are enough), configure again and build. Or start the program without a launcher: ranks as threads");
}

}  // namespace lockstep::comm

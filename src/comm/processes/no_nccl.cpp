// Stands in for nccl.cpp in a build without CUDA.
#include <lockstep/base/error.hpp>

#include "comm/group_member.hpp"
#include "comm/world.hpp"

namespace lockstep::comm {

std::unique_ptr<World> make_nccl_world(const Devices&, std::chrono::milliseconds) {
  return nullptr;
}

GroupMember make_nccl_group(const GroupPlace&, const c10::Device&, const CallNotes&) {
  throw Error(
      "this build of lockstep has no CUDA parts, and with them no NCCL, which GPU ranks in several processes need");
}

std::string why_no_gpu_is_shared() {
  return "this build of lockstep has no NCCL";
}

}  // namespace lockstep::comm

#include "accesses.hpp"

#include <algorithm>

#include "reports.hpp"

namespace simulated {
namespace {

bool comes_after(const Stream& stream, int other, uint64_t tick) {
  const auto found = stream.clock.find(other);
  return found != stream.clock.end() && found->second >= tick;
}

const char* verb(bool writes) {
  return writes ? " writes" : " reads";
}

}  // namespace

void Accesses::add(const Stream& stream, const char* begin, const char* end, bool writes, const std::string& what) {
  for (const auto& before : accesses_) {
    if (before.stream == stream.number || !(writes || before.writes)) continue;
    if (before.end <= begin || end <= before.begin || comes_after(stream, before.stream, before.tick)) continue;
    report("race: " + what + " on " + stream.name() + verb(writes) + " what " + before.what + verb(before.writes) +
           " on another stream, and does not wait for it");
  }
  std::erase_if(accesses_, [&](const Access& old) {
    return old.stream == stream.number && begin <= old.begin && old.end <= end && (writes || !old.writes);
  });
  accesses_.push_back({begin, end, writes, stream.number, stream.clock.at(stream.number), what});
}

void Accesses::check_release(const Stream& owner, const std::set<Stream*>& recorded) const {
  for (const auto& access : accesses_) {
    const auto waits = [&](const Stream* stream) {
      return stream->number == access.stream || comes_after(*stream, access.stream, access.tick);
    };
    if (waits(&owner) || std::any_of(recorded.begin(), recorded.end(), waits)) continue;
    report("lifetime: memory is freed to " + owner.name() + " while " + access.what +
           " may still use it on another stream; recordStream is missing");
  }
}

}  // namespace simulated

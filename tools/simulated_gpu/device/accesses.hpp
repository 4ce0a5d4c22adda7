// Accesses: who reads and writes a block of memory. Mistakes are found when a task is queued, whatever the threads do.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "stream.hpp"

namespace simulated {

class Accesses {
 public:
  // `stream` is given a task that uses these bytes. Reports each earlier access that it ought to wait for and does not.
  void add(const Stream& stream, const char* begin, const char* end, bool writes, const std::string& what);

  // The memory goes back to `owner` once the recorded streams have done what they were given. Reports each access for
  // which none of these waits.
  void check_release(const Stream& owner, const std::set<Stream*>& recorded) const;

  void clear() { accesses_.clear(); }

 private:
  struct Access {
    const char *begin, *end;
    bool writes;
    int stream;
    uint64_t tick;
    std::string what;
  };

  std::vector<Access> accesses_;
};

}  // namespace simulated

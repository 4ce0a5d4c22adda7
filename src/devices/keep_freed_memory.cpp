#include <lockstep/devices/keep_freed_memory.hpp>

#include <cstdlib>

#ifdef __GLIBC__
#include <malloc.h>
#endif

namespace lockstep {

void keep_freed_memory() {
#ifdef __GLIBC__
  mallopt(M_MMAP_THRESHOLD, 32 << 20);  // the most that it takes
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
  // For threads: their memory comes in pieces of at most 64 MB. A piece that is all free is unmapped, unless this much
  // must stay.
  mallopt(M_TOP_PAD, 64 << 20);
#endif
}

}  // namespace lockstep

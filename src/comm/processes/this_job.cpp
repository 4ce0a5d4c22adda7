// The one job of a real process.
#include <openssl/crypto.h>

#include "job.hpp"

namespace lockstep::comm {

Job& Job::of_this_process() {
  // The store's threads end with the job, and need OpenSSL until then. What is made first ends last.
  static const int openssl_is_there = OPENSSL_init_crypto(0, nullptr);
  static_cast<void>(openssl_is_there);
  static Job job;
  return job;
}

}  // namespace lockstep::comm

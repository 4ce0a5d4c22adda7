#include "libcrypto.hpp"

#include <openssl/crypto.h>
#include <openssl/opensslv.h>

#include <string>
#include <vector>

namespace lockstep::io {
namespace {

// Tries first the version whose headers this was compiled with.
std::vector<std::string> files_of_libcrypto() {
#ifdef OPENSSL_SHLIB_VERSION
  const std::string of_headers = std::to_string(OPENSSL_SHLIB_VERSION);
#else
  const std::string of_headers = SHLIB_VERSION_NUMBER;
#endif
  std::vector<std::string> files{"libcrypto.so." + of_headers};
  for (const std::string version : {"3", "1.1"}) {
    if (version != of_headers) files.push_back("libcrypto.so." + version);
  }
  return files;
}

Libcrypto load_libcrypto() {
  const SystemLibrary library({.library = "OpenSSL's libcrypto",
                               .files = files_of_libcrypto(),
                               .needed_for = "the SHA-256 of weights and data, and for the keys of jobs",
                               .packages = "OpenSSL 3 or 1.1 (Debian: libssl3)"});
  // Keeps OpenSSL from cleaning up at the process's exit: a thread that still runs, as a store's may, would lose its
  // state. Invariant: this is the first call, because the first one decides.
  library.function<decltype(OPENSSL_init_crypto)>("OPENSSL_init_crypto")(OPENSSL_INIT_NO_ATEXIT, nullptr);
  return {library};
}

}  // namespace

const Libcrypto& libcrypto() {
  static const Libcrypto loaded = load_libcrypto();
  return loaded;
}

}  // namespace lockstep::io

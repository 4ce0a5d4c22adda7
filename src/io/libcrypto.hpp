// libcrypto(): gives the functions of OpenSSL's libcrypto that lockstep calls, under OpenSSL's names. The library is
// loaded at the first call; see system_library.hpp. Thread-safe.
#pragma once

#include <openssl/evp.h>
#include <openssl/hmac.h>

#include "system_library.hpp"

namespace lockstep::io {

struct Libcrypto {
  SystemLibrary library;

  // OpenSSL 1.1 and 3 have all of these functions, with the same arguments.
  decltype(&::EVP_MD_CTX_new) EVP_MD_CTX_new = library.function<decltype(::EVP_MD_CTX_new)>("EVP_MD_CTX_new");
  decltype(&::EVP_MD_CTX_free) EVP_MD_CTX_free = library.function<decltype(::EVP_MD_CTX_free)>("EVP_MD_CTX_free");
  decltype(&::EVP_DigestInit_ex) EVP_DigestInit_ex =
      library.function<decltype(::EVP_DigestInit_ex)>("EVP_DigestInit_ex");
  decltype(&::EVP_DigestUpdate) EVP_DigestUpdate = library.function<decltype(::EVP_DigestUpdate)>("EVP_DigestUpdate");
  decltype(&::EVP_DigestFinal_ex) EVP_DigestFinal_ex =
      library.function<decltype(::EVP_DigestFinal_ex)>("EVP_DigestFinal_ex");
  decltype(&::EVP_Digest) EVP_Digest = library.function<decltype(::EVP_Digest)>("EVP_Digest");
  decltype(&::EVP_sha256) EVP_sha256 = library.function<decltype(::EVP_sha256)>("EVP_sha256");
  decltype(&::HMAC) HMAC = library.function<decltype(::HMAC)>("HMAC");
  decltype(&::CRYPTO_memcmp) CRYPTO_memcmp = library.function<decltype(::CRYPTO_memcmp)>("CRYPTO_memcmp");
};

// Loads the library at the first call. Throws Error if the system has no libcrypto. The next call looks again.
const Libcrypto& libcrypto();

}  // namespace lockstep::io

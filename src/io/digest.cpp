#include "digest.hpp"

#include <lockstep/base/error.hpp>

#include <array>

#include "libcrypto.hpp"

namespace lockstep::io {
namespace {

EVP_MD_CTX* context_of(const std::shared_ptr<void>& context) {
  return static_cast<EVP_MD_CTX*>(context.get());
}

}  // namespace

Digest::Digest(const char* algorithm)
    : context_(libcrypto().EVP_MD_CTX_new(),
               [](void* context) { libcrypto().EVP_MD_CTX_free(static_cast<EVP_MD_CTX*>(context)); }) {
  const EVP_MD* const type = libcrypto().EVP_get_digestbyname(algorithm);
  if (!context_ || type == nullptr || libcrypto().EVP_DigestInit_ex(context_of(context_), type, nullptr) != 1) {
    throw Error("OpenSSL does not offer " + std::string(algorithm) + " here, so that files cannot be verified",
                {Error::machine});
  }
}

void Digest::update(const void* data, size_t bytes) {
  libcrypto().EVP_DigestUpdate(context_of(context_), data, bytes);
}

std::string Digest::hex() {
  std::array<unsigned char, EVP_MAX_MD_SIZE> digest{};
  unsigned size = 0;
  libcrypto().EVP_DigestFinal_ex(context_of(context_), digest.data(), &size);
  std::string text;
  for (unsigned i = 0; i < size; ++i) {
    text += "0123456789abcdef"[digest[i] >> 4];
    text += "0123456789abcdef"[digest[i] & 15];
  }
  return text;
}

}  // namespace lockstep::io

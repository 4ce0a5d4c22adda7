#include "digest.hpp"

#include <lockstep/base/error.hpp>

#include <array>

#include "base/number_text.hpp"
#include "libcrypto.hpp"

namespace lockstep::io {

Digest::Digest() : context_(libcrypto().EVP_MD_CTX_new(), libcrypto().EVP_MD_CTX_free) {
  if (!context_ || libcrypto().EVP_DigestInit_ex(context_.get(), libcrypto().EVP_sha256(), nullptr) != 1) {
    throw Error("OpenSSL does not offer SHA-256 here, so that files cannot be verified", {Error::machine});
  }
}

void Digest::update(const void* data, size_t bytes) {
  libcrypto().EVP_DigestUpdate(context_.get(), data, bytes);
}

std::string Digest::hex() {
  std::array<unsigned char, EVP_MAX_MD_SIZE> digest{};
  unsigned size = 0;
  libcrypto().EVP_DigestFinal_ex(context_.get(), digest.data(), &size);
  std::string text;
  for (unsigned i = 0; i < size; ++i) text += hex_text(digest[i], 2);
  return text;
}

std::string sha256_of(const std::string& text) {
  Digest digest;
  digest.update(text);
  return digest.hex();
}

}  // namespace lockstep::io

// Digest: computes the SHA-256 of bytes, by OpenSSL.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

struct evp_md_ctx_st;  // OpenSSL's EVP_MD_CTX

namespace lockstep::io {

class Digest {
 public:
  Digest();  // throws Error if OpenSSL is not there
  void update(const void* data, size_t bytes);
  void update(const std::string& text) { update(text.data(), text.size()); }
  std::string hex();  // the digest of all that was given; ends the work

 private:
  std::shared_ptr<evp_md_ctx_st> context_;
};

std::string sha256_of(const std::string& text);

}  // namespace lockstep::io

// SHA-256 against the examples of NIST, in plain code and in what this processor does fastest.
#include "io/sha256.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

namespace sha256_test {

using lockstep::io::Sha256;

std::string hash_of(const std::string& text, Sha256::Blocks blocks) {
  Sha256 sha(blocks);
  sha.update(text);
  return sha.hex();
}

// https://csrc.nist.gov/projects/cryptographic-standards-and-guidelines/example-values
TEST(Sha256Test, GivesThePublishedHashes) {
  for (const auto blocks : {Sha256::in_plain_code(), Sha256::fastest()}) {
    EXPECT_EQ(hash_of("", blocks), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    EXPECT_EQ(hash_of("abc", blocks), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    EXPECT_EQ(hash_of("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq", blocks),
              "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
    EXPECT_EQ(hash_of(std::string(1'000'000, 'a'), blocks),
              "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
  }
}

// Of every length around a block's, and given in pieces.
TEST(Sha256Test, DoesNotDependOnThePieces) {
  std::string text;
  for (int i = 0; i < 300; ++i) text += static_cast<char>(i * 37);
  for (size_t size = 0; size <= text.size(); ++size) {
    const std::string expected = hash_of(text.substr(0, size), Sha256::in_plain_code());
    EXPECT_EQ(hash_of(text.substr(0, size), Sha256::fastest()), expected) << size;
    Sha256 sha;
    for (size_t at = 0, piece = 1; at < size; at += piece, piece = piece * 3 % 67) {
      sha.update(text.data() + at, std::min(piece, size - at));
    }
    EXPECT_EQ(sha.hex(), expected) << size;
  }
}

}  // namespace sha256_test

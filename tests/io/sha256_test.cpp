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

std::string hex(const std::string& bytes) {
  std::string text;
  for (const char byte : bytes) {
    for (const int shift : {4, 0}) text += "0123456789abcdef"[byte >> shift & 15];
  }
  return text;
}

// RFC 4231, test cases 1, 2 and 6.
TEST(Sha256Test, SignsAsThePublishedExamplesDo) {
  using lockstep::io::hmac_sha256;
  EXPECT_EQ(hex(hmac_sha256(std::string(20, '\x0b'), "Hi There")),
            "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  EXPECT_EQ(hex(hmac_sha256("Jefe", "what do ya want for nothing?")),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  EXPECT_EQ(hex(hmac_sha256(std::string(131, '\xaa'), "Test Using Larger Than Block-Size Key - Hash Key First")),
            "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
}

}  // namespace sha256_test

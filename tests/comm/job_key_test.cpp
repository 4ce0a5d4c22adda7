// A job's key: what is one, and what it signs.
#include "comm/job_key.hpp"

#include <gmock/gmock.h>
#include <sys/stat.h>
#include <torch/torch.h>
#include <unistd.h>

#include "io/libcrypto.hpp"
#include "support/error_of.hpp"
#include "support/scratch_folder.hpp"

#include <cstdlib>

namespace job_key_test {

using namespace lockstep;
using comm::JobKey;

class JobKeyFile : public testing::Test {
 protected:
  std::filesystem::path file(const std::string& bytes, mode_t mode = 0600) const {
    folder_.write("key", bytes);
    chmod((folder_ / "key").c_str(), mode);
    return folder_ / "key";
  }
  lockstep::Caught refusal(const std::filesystem::path& file) const {
    return error_of([&] { JobKey::from_file(file); });
  }

  const ScratchFolder folder_;
};

TEST_F(JobKeyFile, IsRefusedWithWhatToDo) {
  const std::string good(32, 'k');
  EXPECT_THAT(refusal(folder_ / "none"), Fails(Error::file));
  EXPECT_THAT(refusal("/proc/self/fd/100000"), Fails(Error::file));
  EXPECT_THAT(refusal(file(std::string(31, 'k'))), Fails(Error::file));
  EXPECT_THAT(refusal(file(std::string(4097, 'k'))), Fails(Error::file));
  for (const mode_t mode : {0640, 0604, 0620, 0602}) {
    EXPECT_THAT(refusal(file(good, mode)), Fails(Error::file)) << mode;
  }
  ASSERT_EQ(mkfifo((folder_ / "pipe").c_str(), 0600), 0);
  EXPECT_THAT(refusal(folder_ / "pipe"), Fails(Error::file));
  EXPECT_EQ(refusal(file(good)), "(no error)");
  EXPECT_EQ(refusal(file(std::string(4096, 'k'), 0400)), "(no error)");
}

TEST_F(JobKeyFile, OfTheSameBytesMakesTheSameKey) {
  const auto key = JobKey::from_file(file(std::string(32, 'k'))), same = JobKey::from_file(folder_ / "key");
  const auto other = JobKey::from_file(file(std::string(31, 'k') + "l"));
  EXPECT_TRUE(same.has_signed(key.sign({"text"}), {"text"}));
  EXPECT_FALSE(other.has_signed(key.sign({"text"}), {"text"}));
  EXPECT_FALSE(JobKey::known_to_all().has_signed(key.sign({"text"}), {"text"}));
}

// HMAC-SHA256, as others have it: python3 -c 'import hashlib as h, hmac; print(hmac.new(h.sha256(b"k"*32).digest(),
// b"4:text3:two", "sha256").hexdigest())'
TEST_F(JobKeyFile, SignsAsHmacSha256Does) {
  std::string hex;
  for (const unsigned char byte : JobKey::from_file(file(std::string(32, 'k'))).sign({"text", "two"})) {
    hex += "0123456789abcdef"[byte >> 4];
    hex += "0123456789abcdef"[byte & 15];
  }
  EXPECT_EQ(hex, "5157812c47bb41bee069194d7c3cc6966fca878edfff8ee3b10e3b3086080181");
}

TEST(JobKey, SignsWhereItsPartsEnd) {
  const comm::HandedKey handed;
  const JobKey key = handed.key();
  const auto signature = key.sign({"ab", "c"});
  EXPECT_TRUE(key.has_signed(signature, {"ab", "c"}));
  EXPECT_FALSE(key.has_signed(signature, {"a", "bc"}));
  EXPECT_FALSE(key.has_signed(signature, {"ab", "c", ""}));
  EXPECT_FALSE(key.has_signed(signature.substr(1), {"ab", "c"}));
  EXPECT_FALSE(key.has_signed("", {"ab", "c"}));
}

TEST(JobKey, IsAnotherOneForEachLaunch) {
  const comm::HandedKey one, other;
  EXPECT_TRUE(JobKey::from_file(one.file()).has_signed(one.key().sign({"text"}), {"text"}));
  EXPECT_FALSE(other.key().has_signed(one.key().sign({"text"}), {"text"}));
}

// A store's thread may still sign, or just end, while the process exits.
TEST(JobKeyDeathTest, LeavesOpenSslAsItIsAtTheExit) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // in a process in which nothing else has called OpenSSL
  const auto use_and_exit = [] {
    comm::HandedKey().key().sign({"text"});
    // Called by its cleaning up.
    io::libcrypto().library.function<int(void (*)())>("OPENSSL_atexit")([] { _exit(7); });
    std::exit(0);
  };
  EXPECT_EXIT(use_and_exit(), testing::ExitedWithCode(0), "");
}

}  // namespace job_key_test

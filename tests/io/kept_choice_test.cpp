// A measured choice is kept for later processes, and no process ends for lack of a place to keep it.
#include <gtest/gtest.h>

#include "io/kept_choice.hpp"
#include "support/scratch_folder.hpp"

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <new>
#include <optional>
#include <string>

namespace kept_choice_test {

using lockstep::io::kept_choice;

// Puts the cache folder elsewhere while it lives.
class CacheIn {
 public:
  explicit CacheIn(const std::filesystem::path& folder) {
    if (const char* const value = std::getenv("XDG_CACHE_HOME")) before_ = value;
    setenv("XDG_CACHE_HOME", folder.c_str(), 1);
  }
  ~CacheIn() { before_ ? setenv("XDG_CACHE_HOME", before_->c_str(), 1) : unsetenv("XDG_CACHE_HOME"); }

 private:
  std::optional<std::string> before_;
};

class KeptChoice : public testing::Test {
 protected:
  // Gives what is kept, or else `word`.
  std::string choose(const std::string& key, const std::string& word) {
    return kept_choice(key, "otherwise", [&] { return ++measured_, word; });
  }

  const lockstep::ScratchFolder folder_;
  const CacheIn cache_{folder_.path()};
  int measured_ = 0;
};

TEST_F(KeptChoice, IsMeasuredOnceForEachKey) {
  EXPECT_EQ(choose("one", "left"), "left");
  EXPECT_EQ(choose("one", "right"), "left");
  EXPECT_EQ(choose("other", "right"), "right");
  EXPECT_EQ(measured_, 2);
  size_t files = 0;
  for (const auto& file : std::filesystem::directory_iterator(folder_ / "lockstep")) files += file.is_regular_file();
  EXPECT_EQ(files, 2u);
}

TEST_F(KeptChoice, IsThatOfTheProcessThatIsDoneFirst) {
  const std::string chosen = kept_choice("one", "otherwise", [&] {
    choose("one", "first");
    return "second";
  });
  EXPECT_EQ(chosen, "first");
}

TEST_F(KeptChoice, IsNotMeasuredWhereNothingCanBeKept) {
  std::ofstream(folder_ / "lockstep") << "no folder";
  EXPECT_EQ(choose("one", "left"), "otherwise");
  EXPECT_EQ(measured_, 0);
}

TEST_F(KeptChoice, LeavesNoFileIfItsMeasurementThrows) {
  EXPECT_THROW(kept_choice("one", "otherwise", []() -> std::string { throw std::bad_alloc(); }), std::bad_alloc);
  EXPECT_TRUE(std::filesystem::is_empty(folder_ / "lockstep"));
}

}  // namespace kept_choice_test

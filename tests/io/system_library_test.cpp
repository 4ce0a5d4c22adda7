// A library that the system has is loaded by the first name that it goes by. One that it has not is an error that
// helps.
#include "io/system_library.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <zlib.h>

#include "support/error_of.hpp"

#include <string>
#include <vector>

namespace lockstep::io {
namespace system_library_test {

SystemLibraryNames named(const std::vector<std::string>& files) {
  return {.library = "NoLib", .files = files, .needed_for = "nothing at all", .packages = "libno9"};
}

TEST(SystemLibrary, ThatIsMissingIsToldWithWhatNeedsItAndWhatToInstall) {
  EXPECT_THAT(error_of([] { SystemLibrary(named({"libno.so.9", "libno.so.8"})); }), Fails(Error::machine));
}

TEST(SystemLibrary, GoesByTheFirstNameThatIsThere) {
  const SystemLibrary zlib(named({"libno.so.9", "libz.so.1", "libno.so.8"}));
  EXPECT_EQ(zlib.function<decltype(::zlibVersion)>("zlibVersion")(), std::string(::zlibVersion()));
}

TEST(SystemLibrary, WithoutAFunctionIsToldByItsFile) {
  const SystemLibrary zlib(named({"libz.so.1"}));
  EXPECT_THAT(error_of([&] { zlib.function<void()>("deflate_all"); }), Fails(Error::machine));
}

}  // namespace system_library_test
}  // namespace lockstep::io

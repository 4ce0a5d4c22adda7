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

using testing::AllOf;
using testing::HasSubstr;

SystemLibraryNames named(const std::vector<std::string>& files) {
  return {.library = "NoLib", .files = files, .needed_for = "nothing at all", .packages = "libno9"};
}

TEST(SystemLibrary, ThatIsMissingIsToldWithWhatNeedsItAndWhatToInstall) {
  EXPECT_THAT(
      error_of([] {
        SystemLibrary(named({"libno.so.9", "libno.so.8"}));
      }),
      AllOf(HasSubstr("cannot load NoLib, which is needed for nothing at all"),
            HasSubstr("libno.so.9: cannot open shared object file: No such file or directory"),
            HasSubstr("libno.so.8: cannot open"), HasSubstr("Install libno9, or"), HasSubstr("LD_LIBRARY_PATH")));
}

TEST(SystemLibrary, GoesByTheFirstNameThatIsThere) {
  const SystemLibrary zlib(named({"libno.so.9", "libz.so.1", "libno.so.8"}));
  EXPECT_EQ(zlib.function<decltype(::zlibVersion)>("zlibVersion")(), std::string(::zlibVersion()));
}

TEST(SystemLibrary, WithoutAFunctionIsToldByItsFile) {
  const SystemLibrary zlib(named({"libz.so.1"}));
  EXPECT_THAT(error_of([&] { zlib.function<void()>("deflate_all"); }),
              AllOf(HasSubstr("libz.so.1"), HasSubstr("deflate_all")));
}

}  // namespace system_library_test
}  // namespace lockstep::io

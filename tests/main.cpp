// Runs tests. Those of many files are one program, which takes a fraction of the time to build; `--only FILE` runs one
// file's.
#include <ATen/Parallel.h>
#include <gmock/gmock.h>

#include <iostream>
#include <string>
#include <string_view>

namespace {

// Leaves out what the filter would let through of other files. Returns whether there is a suite of this one.
bool leave_only(std::string_view file) {
  bool found = false;
  std::string others;
  const auto& tests = *testing::UnitTest::GetInstance();
  for (int i = 0; i < tests.total_test_suite_count(); ++i) {
    const auto& suite = *tests.GetTestSuite(i);
    if (suite.total_test_count() == 0) continue;
    if (std::string_view(suite.GetTestInfo(0)->file()).ends_with("/" + std::string(file))) {
      found = true;
    } else {
      others += std::string(":") + suite.name() + ".*";
    }
  }
  if (others.empty()) return found;
  const std::string filter = GTEST_FLAG_GET(filter);
  GTEST_FLAG_SET(filter, filter + (filter.find('-') == std::string::npos ? "-" + others.substr(1) : others));
  return found;
}

}  // namespace

int main(int argc, char** argv) {
  testing::InitGoogleMock(&argc, argv);
  at::set_num_threads(1);  // the tests run side by side; more threads than cores would only wait for each other
  if (argc == 3 && argv[1] == std::string_view("--only") && !leave_only(argv[2])) {
    std::cerr << "there are no tests of " << argv[2] << " in this program\n";
    return 1;
  }
  return RUN_ALL_TESTS();
}

// Runs tests. Those of many files are one program, which takes a fraction of the time to build; `--only FILE` runs one
// file's.
#include <ATen/Parallel.h>
#include <gmock/gmock.h>

#include <iostream>
#include <string>
#include <string_view>

#include "simulated_device.hpp"

namespace {

// On a simulated device, a test fails in which the device saw a mistake.
class Reports : public testing::EmptyTestEventListener {
  void OnTestEnd(const testing::TestInfo&) override {
    const auto texts = lockstep::simulated::take_reports();
    for (size_t i = 0; i < texts.size() && i < 10; ++i) ADD_FAILURE() << texts[i];
    if (texts.size() > 10) ADD_FAILURE() << "and " << texts.size() - 10 << " mistakes more";
  }
};

// Leaves out what the filter would let through of other files. Returns what is wrong, if something is.
std::string leave_only(const std::string& file) {
  bool found = false;
  std::string others;
  const auto& tests = *testing::UnitTest::GetInstance();
  for (int i = 0; i < tests.total_test_suite_count(); ++i) {
    const auto& suite = *tests.GetTestSuite(i);
    const auto file_of = [&](int test) { return std::string_view(suite.GetTestInfo(test)->file()); };
    for (int test = 1; test < suite.total_test_count(); ++test) {
      if (file_of(test) != file_of(0)) return std::string(suite.name()) + " is a suite of two files; rename one";
    }
    if (suite.total_test_count() == 0) continue;
    if (file_of(0).ends_with("/" + file)) {
      found = true;
    } else {
      others += std::string(":") + suite.name() + ".*";
    }
  }
  if (!found) return "there are no tests of " + file + " in this program";
  if (others.empty()) return "";
  const std::string filter = GTEST_FLAG_GET(filter);
  GTEST_FLAG_SET(filter, filter + (filter.find('-') == std::string::npos ? "-" + others.substr(1) : others));
  return "";
}

}  // namespace

int main(int argc, char** argv) {
  testing::InitGoogleMock(&argc, argv);
  at::set_num_threads(1);  // the tests run side by side; more threads than cores would only wait for each other
  std::string wrong;
  if (argc == 3 && argv[1] == std::string_view("--only")) {
    wrong = leave_only(argv[2]);
  } else if (argc > 1) {
    wrong = std::string("unknown argument ") + argv[1];
  }
  if (!wrong.empty()) {
    std::cerr << wrong << "\n";
    return 1;
  }
  if (lockstep::simulated::is_there()) testing::UnitTest::GetInstance()->listeners().Append(new Reports);
  return RUN_ALL_TESTS();
}

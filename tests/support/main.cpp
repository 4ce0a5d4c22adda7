// Runs tests. Those of many files are one program, which takes a fraction of the time to build. `--only FILE` runs one
// file's, `--tests LIST` those that a list selects, a line for each file.
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <gmock/gmock.h>

#include <iostream>
#include <string>
#include <string_view>

#include "cli/end_process.hpp"
#include "selection.hpp"
#include "simulated_device.hpp"
#include "test_devices.hpp"

namespace {

// On a simulated device, a test fails in which the device saw a mistake.
class Reports : public testing::EmptyTestEventListener {
  void OnTestEnd(const testing::TestInfo&) override {
    const auto texts = lockstep::simulated::take_reports();
    for (size_t i = 0; i < texts.size() && i < 10; ++i) ADD_FAILURE() << texts[i];
    if (texts.size() > 10) ADD_FAILURE() << "and " << texts.size() - 10 << " mistakes more";
  }
};

}  // namespace

int main(int argc, char** argv) {
  testing::InitGoogleMock(&argc, argv);
  at::set_num_threads(1);  // the tests run side by side; more threads than cores would only wait for each other
  std::string wrong;
  if (argc == 3 && argv[1] == std::string_view("--only")) {
    wrong = lockstep::leave_only({{argv[2], GTEST_FLAG_GET(filter)}});
  } else if (argc == 3 && argv[1] == std::string_view("--tests")) {
    wrong = lockstep::leave_only(lockstep::read_selections(argv[2]));
  } else if (argc > 1) {
    wrong = std::string("unknown argument ") + argv[1];
  }
  if (!wrong.empty()) {
    std::cerr << wrong << "\n";
    return 1;
  }
  if (const std::string missing = lockstep::missing_test_devices(); !missing.empty()) {
    std::cout << "SKIPPED: no such devices: " << missing << "\n";
    return 0;
  }
  if (lockstep::on_real_gpus()) {  // by default cuDNN rounds factors to TF32, and adds in another order each time
    at::globalContext().setAllowTF32CuDNN(false);
    at::globalContext().setDeterministicCuDNN(true);
  }
  if (lockstep::simulated::is_there()) testing::UnitTest::GetInstance()->listeners().Append(new Reports);
  lockstep::end_process(RUN_ALL_TESTS());
}

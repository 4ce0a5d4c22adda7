#include <ATen/Parallel.h>
#include <gmock/gmock.h>

int main(int argc, char** argv) {
  testing::InitGoogleMock(&argc, argv);
  at::set_num_threads(1);  // the tests run side by side; more threads than cores would only wait for each other
  return RUN_ALL_TESTS();
}

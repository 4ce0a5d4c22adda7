// Counts what DataParallel adds to a step of a small net on one rank: calls of LibTorch's operators, and pieces of
// memory. On one rank nothing is to be averaged, and nobody is there to compare with.
#include <ATen/record_function.h>
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/data_parallel/data_parallel.hpp>

#include "support/test_devices.hpp"

#include <cstdlib>
#include <functional>
#include <map>
#include <new>
#include <string>
#include <string_view>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define LOCKSTEP_COUNTS_MEMORY 0
#elif defined(__has_feature)
#define LOCKSTEP_COUNTS_MEMORY !(__has_feature(address_sanitizer) || __has_feature(thread_sanitizer))
#else
#define LOCKSTEP_COUNTS_MEMORY 1
#endif

namespace small_step_test {

thread_local int64_t pieces = 0;  // how often this thread has called operator new

}  // namespace small_step_test

#if LOCKSTEP_COUNTS_MEMORY  // a sanitizer has an operator new of its own
void* operator new(size_t bytes) {
  ++small_step_test::pieces;
  if (void* const memory = std::malloc(bytes > 0 ? bytes : 1)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept {
  std::free(memory);
}
void operator delete(void* memory, size_t) noexcept {
  std::free(memory);
}
#endif

namespace small_step_test {

using lockstep::Rank;
namespace F = torch::nn::functional;

struct Net : torch::nn::Module {
  torch::nn::Linear a = register_module("a", torch::nn::Linear(8, 32));
  torch::nn::Linear b = register_module("b", torch::nn::Linear(32, 4));
  torch::Tensor forward(torch::Tensor x) { return b(torch::tanh(a(x))); }
};

using Calls = std::map<std::string, int>;  // how often each operator was called
thread_local Calls calls;

struct Cost {
  Calls operators;
  int64_t pieces = 0;
};

// The cost of a step after the first ones, which look for mistakes and check the criterion.
Cost of_late(const std::function<void()>& step) {
  for (int early = 0; early < 20; ++early) step();
  calls.clear();
  const auto handle = at::addThreadLocalCallback(
      at::RecordFunctionCallback([](const at::RecordFunction& function) -> std::unique_ptr<at::ObserverContext> {
        if (std::string_view(function.name()).starts_with("aten::")) ++calls[function.name()];
        return nullptr;
      }).scopes({at::RecordScope::FUNCTION}));
  step();
  at::removeCallback(handle);
  const int64_t before = pieces;
  step();
  return {calls, pieces - before};
}

TEST(SmallStepTest, OnOneRankNoOperatorComesOnTopAndLittleMemory) {
  lockstep::run(lockstep::test_devices(1), [](Rank& rank) {
    const lockstep::Batch batch{torch::randn({32, 8}), torch::randn({32, 4}), 32};
    const auto alone = std::make_shared<Net>();
    torch::optim::SGD alone_sgd(alone->parameters(), 0.01);
    lockstep::DataParallel net(Net(), rank);
    torch::optim::SGD sgd(net->parameters(), 0.01);
    const Cost of_libtorch = of_late([&] {
      alone_sgd.zero_grad();
      F::mse_loss(alone->forward(batch.x), batch.y).backward();
      alone_sgd.step();
    });
    const Cost of_ours = of_late([&] {
      sgd.zero_grad();
      net.loss(batch, F::mse_loss).backward();
      sgd.step();
    });
    ASSERT_FALSE(of_ours.operators.empty());
    for (const auto& [name, count] : of_ours.operators) {
      const auto found = of_libtorch.operators.find(name);
      EXPECT_LE(count, found == of_libtorch.operators.end() ? 0 : found->second) << name;
    }
    EXPECT_LE(of_ours.pieces, of_libtorch.pieces + 1);  // the loss
  });
}

}  // namespace small_step_test

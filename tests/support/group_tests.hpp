// Slices of whole tensors, comparisons, and ranks whose calls are counted, for tests of groups of ranks.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <lockstep/ranks/rank.hpp>

#include "data/parts.hpp"
#include "error_of.hpp"
#include "small_nets.hpp"
#include "test_devices.hpp"

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace lockstep {

inline at::Tensor slice_of(const at::Tensor& whole, int64_t dim, const Rank& rank) {
  const Range part = part_of(whole.size(dim), rank.index(), rank.world_size());
  return whole.detach().narrow(dim, part.begin, part.size()).clone().to(rank.device());
}

inline void expect_near(const at::Tensor& actual, const at::Tensor& expected, double tolerance,
                        const std::string& what) {
  ASSERT_EQ(actual.defined(), expected.defined()) << what;
  if (!actual.defined()) return;
  ASSERT_EQ(actual.sizes(), expected.sizes()) << what;
  if (expected.numel() == 0) return;
  const double scale = std::max(1.0, expected.abs().max().item<double>());
  EXPECT_LE((actual.cpu() - expected.cpu()).abs().max().item<double>(), tolerance * scale) << what;
}

// To the bit. All ranks must call it.
inline void expect_equal_on_all_ranks(const at::Tensor& tensor, Rank& rank, const std::string& what) {
  const at::Tensor first = tensor.detach().clone();
  rank.broadcast(first);
  EXPECT_TRUE(first.equal(tensor.detach())) << what << " on rank " << rank.index();
}

// For tests over several numbers of ranks, the parameter.
class Worlds : public testing::TestWithParam<int> {
 protected:
  Worlds() { torch::manual_seed(GetParam()); }  // in every process the same

  static void on_ranks(const std::function<void(Rank&)>& body) { run(test_devices(GetParam()), body); }
};

// Gives what run() throws, or "(no error)".
inline Caught error_on_ranks(int count, const std::function<void(Rank&)>& body) {
  return error_of([&] { run(test_devices(count), body); });
}

// Gives what the body throws on each of `count` ranks, which catch it.
inline std::vector<Caught> errors_on_ranks(int count, const std::function<void(Rank&)>& body) {
  std::vector<Caught> errors(static_cast<size_t>(count));
  run(test_devices(count),
      [&](Rank& rank) { errors[static_cast<size_t>(rank.index())] = error_of([&] { body(rank); }); });
  return errors;
}

// Notes the name of each collective call, and hands it on. As NCCL it refuses memory in another order than a tensor's.
class CountingBackend : public c10d::Backend {
 public:
  using Calls = std::vector<std::string>;
  using Tensors = std::vector<at::Tensor>;
  using Work = c10::intrusive_ptr<c10d::Work>;

  CountingBackend(c10::intrusive_ptr<c10d::Backend> backend, std::shared_ptr<Calls> calls)
      : Backend(backend->getRank(), backend->getSize()), backend_(std::move(backend)), calls_(std::move(calls)) {}

  const std::string getBackendName() const override { return backend_->getBackendName(); }
  Work allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    calls_->push_back("allreduce");
    check_order(tensors);
    return backend_->allreduce(tensors, options);
  }
  Work broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    calls_->push_back("broadcast");
    check_order(tensors);
    return backend_->broadcast(tensors, options);
  }
  Work allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    calls_->push_back("allgather");
    return backend_->allgather(outputs, inputs, options);
  }
  Work _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    calls_->push_back("allgather");
    check_order({output, input});
    return backend_->_allgather_base(output, input, options);
  }
  Work _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    calls_->push_back("reduce_scatter");
    check_order({output, input});
    return backend_->_reduce_scatter_base(output, input, options);
  }
  Work reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                      const c10d::ReduceScatterOptions& options) override {
    calls_->push_back("reduce_scatter");
    return backend_->reduce_scatter(outputs, inputs, options);
  }
  Work barrier(const c10d::BarrierOptions& options) override { return backend_->barrier(options); }

 private:
  static void check_order(const Tensors& tensors) {
    for (const auto& tensor : tensors) TORCH_CHECK(tensor.is_contiguous(), "Tensors must be contiguous");
  }

  const c10::intrusive_ptr<c10d::Backend> backend_;
  const std::shared_ptr<Calls> calls_;
};

// A rank like `rank` whose calls are noted in `calls`; barriers are not.
inline Rank counted(Rank& rank, const std::shared_ptr<CountingBackend::Calls>& calls) {
  return rank.wrapped([calls](const auto& backend) { return c10::make_intrusive<CountingBackend>(backend, calls); });
}

}  // namespace lockstep

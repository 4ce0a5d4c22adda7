// Every call over NCCL, for three ranks, with values that differ by rank.
#pragma once

#include <torch/torch.h>
#include <lockstep/ranks/rank.hpp>

#include <cmath>
#include <stdexcept>
#include <string>
#include <vector>

namespace lockstep {

// [1, 2, … count], times the rank's number from 1 on.
inline torch::Tensor one_to(Rank& rank, int64_t count) {
  return torch::arange(1, count + 1, torch::TensorOptions(rank.device())).to(torch::kFloat) *
         static_cast<double>(rank.index() + 1);
}

inline void expect_values(const torch::Tensor& actual, const torch::Tensor& expected, const std::string& what) {
  if (actual.cpu().equal(expected)) return;
  throw std::runtime_error(c10::str(what, ": actual\n", actual.cpu(), "\nexpected\n", expected));
}

// Throws if something is not as it should be.
inline void make_every_call(Rank& rank) {
  const torch::Tensor base = torch::arange(1, 4).to(torch::kFloat);
  const torch::Tensor sum = one_to(rank, 3);
  rank.allreduce(sum);
  expect_values(sum, base * 6, "allreduce");
  const torch::Tensor largest = one_to(rank, 3);
  rank.allreduce(largest, c10d::ReduceOp::MAX);
  expect_values(largest, base * 3, "allreduce of maxima");
  const torch::Tensor sent = one_to(rank, 3);
  rank.broadcast(sent, /*root=*/1);
  expect_values(sent, base * 2, "broadcast");
  expect_values(rank.allgather(one_to(rank, 3)), torch::stack({base, base * 2, base * 3}), "allgather");
  const torch::Tensor rows = torch::stack({one_to(rank, 2), one_to(rank, 2) * 10, one_to(rank, 2) * 100});
  expect_values(rank.reduce_scatter(rows), torch::tensor({6.0f, 12.0f}) * std::pow(10, rank.index()), "reduce_scatter");

  const auto options = torch::TensorOptions(rank.device());
  std::vector<torch::Tensor> parts, others(3);
  for (int other = 0; other < 3; ++other) {
    parts.push_back(torch::full({1 + other}, 10 * rank.index() + other, options).to(torch::kFloat));
    others[other] = torch::zeros({1 + rank.index()}, options);
  }
  rank.backend().alltoall(others, parts)->wait();
  for (int other = 0; other < 3; ++other) {
    expect_values(others[other], torch::full({1 + rank.index()}, 10.0f * other + rank.index()), "alltoall");
  }

  const int next = (rank.index() + 1) % 3, before = (rank.index() + 2) % 3;
  std::vector<torch::Tensor> out{one_to(rank, 2)}, in{torch::zeros({2}, options)};
  // Messages wait for each other in the order in which they are queued: not all ranks may send first.
  if (rank.index() == 0) rank.backend().send(out, next, 0)->wait();
  rank.backend().recv(in, before, 0)->wait();
  if (rank.index() != 0) rank.backend().send(out, next, 0)->wait();
  expect_values(in[0], torch::tensor({1.0f, 2.0f}) * (before + 1), "message");

  Rank pair = rank.group(rank.index() == 2 ? 1 : 0);
  const torch::Tensor of_pair = one_to(rank, 2);
  pair.allreduce(of_pair);
  expect_values(of_pair, torch::tensor({3.0f, 6.0f}), "allreduce in a group");  // 1 + 2, and 3 alone
  rank.barrier();
}

}  // namespace lockstep

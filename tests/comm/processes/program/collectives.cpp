#include <torch/torch.h>
#include <lockstep/base/error.hpp>
#include <lockstep/ranks/rank.hpp>

#include <chrono>
#include <thread>

#include "scenarios.hpp"

namespace {

using c10d::ReduceOp;
using lockstep::Rank;
using torch::Tensor;
using Tensors = std::vector<Tensor>;

void expect_equal(const Tensor& actual, const Tensor& expected, const std::string& what) {
  if (actual.sizes() == expected.sizes() && torch::equal(actual, expected)) return;
  throw lockstep::Error(c10::str(what, ": actual\n", actual, "\nexpected\n", expected));
}

// Gives rank `rank`'s values: no two ranks' are equal, and all are small enough for every type's sums and products.
Tensor value(int rank, c10::IntArrayRef shape, torch::Dtype type = torch::kFloat) {
  const int64_t count = c10::multiply_integers(shape);
  return ((torch::arange(count) + rank) % 3 + 1).view(shape).to(type);
}

Tensors values(int world, c10::IntArrayRef shape, torch::Dtype type = torch::kFloat) {
  Tensors all;
  for (int rank = 0; rank < world; ++rank) all.push_back(value(rank, shape, type));
  return all;
}

void allreduces(Rank& rank) {
  const int world = rank.world_size();
  const Tensor all = torch::stack(values(world, {2, 7}));
  const auto reduced = [&](ReduceOp::RedOpType op) {
    const Tensor tensor = value(rank.index(), {2, 7});
    rank.allreduce(tensor, op);
    return tensor;
  };
  expect_equal(reduced(ReduceOp::SUM), all.sum(0), "sum");
  expect_equal(reduced(ReduceOp::AVG), all.sum(0) / world, "avg");
  expect_equal(reduced(ReduceOp::PRODUCT), all.prod(0), "product");
  expect_equal(reduced(ReduceOp::MIN), all.amin(0), "min");
  expect_equal(reduced(ReduceOp::MAX), all.amax(0), "max");

  for (const auto type : {torch::kFloat, torch::kDouble, torch::kHalf, torch::kBFloat16, torch::kInt8, torch::kUInt8,
                          torch::kInt16, torch::kInt32, torch::kInt64, torch::kComplexFloat}) {
    const Tensor tensor = value(rank.index(), {11}, type);
    rank.allreduce(tensor);
    expect_equal(tensor, torch::stack(values(world, {11}, type)).sum(0).to(type), "sum of a type");
  }
  for (const auto& shape : std::vector<std::vector<int64_t>>{{}, {0}, {1}, {3, 0, 2}, {5, 4, 3}, {100'003}}) {
    const Tensor tensor = value(rank.index(), shape);
    rank.allreduce(tensor);
    expect_equal(tensor, torch::stack(values(world, shape)).sum(0), "sum of a shape");
  }
  const Tensor transposed = value(rank.index(), {4, 3}).t();
  rank.allreduce(transposed);
  expect_equal(transposed, torch::stack(values(world, {4, 3})).sum(0).t(), "sum of a transposed tensor");
}

// Sums that depend on the order of addition: the same bits on all ranks, and each time.
void equal_bits(Rank& rank) {
  const int64_t size = 10'001;  // numbers that look random; the ranks of a process share LibTorch's generator
  const Tensor scrambled = (torch::arange(rank.world_size() * size) * 7919 % 10'007).view({rank.world_size(), size});
  const Tensor all = scrambled.to(torch::kFloat) / 10'007 * torch::logspace(-3, 3, size);
  Tensor first;
  for (int repeat = 0; repeat < 3; ++repeat) {
    std::this_thread::sleep_for(std::chrono::milliseconds((rank.index() * 7 + repeat * 3) % 5));
    Tensor sum = all[rank.index()].clone();
    rank.allreduce(sum);
    if (repeat == 0) first = sum;
    expect_equal(sum, first, "the same sum again");
    std::vector<Tensors> gathered{Tensors()};
    for (int i = 0; i < rank.world_size(); ++i) gathered[0].push_back(torch::empty_like(sum));
    Tensors mine{sum};
    rank.backend().allgather(gathered, mine)->wait();
    for (const auto& other : gathered[0]) expect_equal(other, sum, "another rank's sum");
    if (!torch::allclose(sum, all.sum(0), 1e-5)) throw lockstep::Error("the sum is wrong");
  }
}

void broadcasts_and_reduces(Rank& rank) {
  const int world = rank.world_size();
  const Tensor sum = torch::stack(values(world, {4, 3})).sum(0);
  for (int root = 0; root < world; ++root) {
    for (const auto type : {torch::kFloat, torch::kInt16, torch::kComplexDouble, torch::kBool}) {
      const Tensor tensor = value(rank.index(), {3, 5}, type);
      rank.broadcast(tensor, root);
      expect_equal(tensor, value(root, {3, 5}, type), "broadcast");
    }
    const Tensor strided = value(rank.index(), {5, 3}).t();
    rank.broadcast(strided, root);
    expect_equal(strided, value(root, {5, 3}).t(), "broadcast of a transposed tensor");

    for (const auto op : {ReduceOp::SUM, ReduceOp::AVG}) {
      Tensors tensor{value(rank.index(), {3, 4}).t()};
      const Tensor before = tensor[0].clone();
      c10d::ReduceOptions options;
      options.rootRank = root;
      options.reduceOp = op;
      rank.backend().reduce(tensor, options)->wait();
      const Tensor total = torch::stack(values(world, {3, 4})).sum(0).t() / (op == ReduceOp::AVG ? world : 1);
      expect_equal(tensor[0], rank.index() == root ? total : before, "reduce");
    }
  }
}

void gathers_and_scatters(Rank& rank) {
  const int world = rank.world_size();
  Tensors input{value(rank.index(), {2, 3})};
  std::vector<Tensors> outputs(1);
  for (int i = 0; i < world; ++i) outputs[0].push_back(i % 2 ? torch::zeros({3, 2}).t() : torch::zeros({2, 3}));
  rank.backend().allgather(outputs, input)->wait();
  for (int i = 0; i < world; ++i) expect_equal(outputs[0][i], value(i, {2, 3}), "allgather");
  Tensor flat = torch::zeros({2 * world, 3});
  rank.backend()._allgather_base(flat, input[0])->wait();
  expect_equal(flat, torch::cat(values(world, {2, 3})), "_allgather_base");

  const Tensor sum = torch::stack(values(world, {world, 3})).sum(0);
  Tensor whole = value(rank.index(), {world, 3});
  std::vector<Tensors> inputs{whole.unbind(0)};
  Tensors output{torch::zeros({3})};
  rank.backend().reduce_scatter(output, inputs)->wait();
  expect_equal(output[0], sum[rank.index()], "reduce_scatter");
  c10d::ReduceScatterOptions options;
  options.reduceOp = ReduceOp::AVG;
  Tensor in_place = whole[rank.index()];
  rank.backend()._reduce_scatter_base(in_place, whole, options)->wait();
  expect_equal(in_place, sum[rank.index()] / world, "_reduce_scatter_base");
}

void alltoalls(Rank& rank) {
  const int world = rank.world_size();
  const auto message = [](int from, int to) { return torch::full({from + 1, to}, 10.0 * from + to); };
  Tensors inputs, outputs;
  for (int i = 0; i < world; ++i) {
    inputs.push_back(message(rank.index(), i));  // to rank 0: nothing
    outputs.push_back(torch::zeros({i + 1, rank.index()}));
  }
  rank.backend().alltoall(outputs, inputs)->wait();
  for (int i = 0; i < world; ++i) expect_equal(outputs[i], message(i, rank.index()), "alltoall");

  // One tensor each, cut by sizes: rank r sends r + 1 rows to everybody.
  Tensor input = torch::full({world * (rank.index() + 1), 2}, rank.index());
  std::vector<int64_t> input_sizes(world, rank.index() + 1), output_sizes;
  Tensors expected;
  for (int i = 0; i < world; ++i) output_sizes.push_back(i + 1), expected.push_back(torch::full({i + 1, 2}, i));
  Tensor output = torch::zeros({world * (world + 1) / 2, 2}, torch::kLong);
  rank.backend().alltoall_base(output, input, output_sizes, input_sizes)->wait();
  expect_equal(output, torch::cat(expected), "alltoall_base");
}

void messages_around_the_ring(Rank& rank) {
  const int world = rank.world_size();
  const int next = (rank.index() + 1) % world, previous = (rank.index() + world - 1) % world;
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  for (int i = 0; i < 3; ++i) {
    Tensors tensor{torch::full({4}, 10 * rank.index() + i)};
    works.push_back(rank.backend().send(tensor, next, /*tag=*/7));
  }
  for (int i = 0; i < 3; ++i) {
    Tensors tensor{torch::zeros({4, 2}, torch::kLong).select(1, 1)};
    rank.backend().recv(tensor, previous, 7)->wait();
    expect_equal(tensor[0], torch::full({4}, 10 * previous + i), "message");
  }
  for (auto& work : works) work->wait();
}

// Rank 0 takes two messages of each other rank as they come, and then one of the same tag by the sender.
void messages_from_any_rank(Rank& rank) {
  constexpr int kOpenTag = 0x4000;
  const int world = rank.world_size();
  const auto message = [](int from, int number) { return torch::full({4}, 10 * from + number); };
  const auto send = [&](int number) {
    Tensors tensor{message(rank.index(), number)};
    rank.backend().send(tensor, 0, kOpenTag)->wait();
  };
  if (rank.index() > 0) {
    send(0);
    send(1);
  } else {
    std::vector<int> came(world);
    for (int i = 0; i < 2 * (world - 1); ++i) {
      Tensors tensor{torch::zeros({4, 2}, torch::kLong).select(1, 1)};
      const auto work = rank.backend().recvAnysource(tensor, kOpenTag);
      work->wait();
      const int source = work->sourceRank();
      expect_equal(tensor[0], message(source, came[source]++), "message from any rank");
    }
  }
  rank.barrier();
  if (rank.index() > 0) return send(2);
  for (int other = 1; other < world; ++other) {
    Tensors tensor{torch::zeros({4}, torch::kLong)};
    rank.backend().recv(tensor, other, kOpenTag)->wait();
    expect_equal(tensor[0], message(other, 2), "message of an open tag");
  }
}

void several_at_once(Rank& rank) {
  const int world = rank.world_size();
  std::vector<Tensors> tensors;
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  for (int i = 0; i < 5; ++i) {
    tensors.push_back({torch::full({1000 + i}, double(rank.index() * 10 + i))});
    works.push_back(rank.backend().allreduce(tensors.back(), c10d::AllreduceOptions()));
  }
  const Tensor between = torch::ones(3);
  rank.broadcast(between);
  for (int i = 4; i >= 0; --i) {
    if (rank.index() == 1) {
      while (!works[i]->isCompleted()) std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    works[i]->wait();
    const double sum = 10.0 * world * (world - 1) / 2 + i * world;
    expect_equal(works[i]->result()[0], torch::full({1000 + i}, sum), "one of several");
  }
}

}  // namespace

void scenarios::collectives(const Setup& setup) {
  lockstep::run(setup.devices, [](Rank& rank) {
    if (rank.world_size() < 2) throw lockstep::Error("this is a world of one; nothing is tested");
    for (const auto& part : {allreduces, equal_bits, broadcasts_and_reduces, gathers_and_scatters, alltoalls,
                             messages_around_the_ring, messages_from_any_rank, several_at_once}) {
      part(rank);
      rank.barrier();
    }
  });
}

void scenarios::runs(const Setup& setup) {
  for (int repeat = 0; repeat < 3; ++repeat) {
    lockstep::run(setup.devices, [&](Rank& outer) {
      const Tensor sum = torch::full({1}, double(outer.index()));
      outer.allreduce(sum);
      expect_equal(sum, torch::full({1}, outer.world_size() * (outer.world_size() - 1) / 2.0), "outer");
      lockstep::run(lockstep::Devices(2, torch::kCPU), [&](Rank& inner) {
        const Tensor inner_sum = torch::full({1}, double(10 * outer.index() + inner.index()));
        inner.allreduce(inner_sum);
        expect_equal(inner_sum, torch::full({1}, 20.0 * outer.index() + 1), "inner");
      });
    });
  }
}

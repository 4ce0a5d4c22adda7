// Labels: concurrency 2x2 3x3 2x4
// rank.backend() is c10d's interface, so a program that knows c10d gets from it what c10d promises, or an Error. The
// cases are those of PyTorch's tests of its collectives: kinds of tensors, values that differ by rank, what nobody
// waits for, and what is refused. They run on ranks in threads, in processes, in both, and over NCCL's stand-in.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/ranks/rank.hpp>

#include "support/error_of.hpp"
#include "support/test_devices.hpp"
#include "support/time_limits.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

namespace c10d_cases_test {

using c10d::ReduceOp;
using lockstep::any_error_of;
using lockstep::Error;
using lockstep::error_of;
using lockstep::Rank;
using lockstep::Refused;
using testing::AnyOf;
using testing::HasSubstr;
using torch::Tensor;
using Tensors = std::vector<Tensor>;
using Shape = std::vector<int64_t>;
using Clock = std::chrono::steady_clock;

class C10dWorlds : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Sizes, C10dWorlds, testing::Values(1, 2, 3, 4),
                         [](const auto& info) { return std::to_string(info.param) + "Ranks"; });

bool is_nccl(Rank& rank) {
  return rank.backend().getBackendName() == "nccl";
}

template <class Options = c10d::AllreduceOptions>
Options with(ReduceOp op) {
  Options options;
  options.reduceOp = std::move(op);
  return options;
}

c10d::ReduceOptions to_root(int root, ReduceOp op) {
  auto options = with<c10d::ReduceOptions>(std::move(op));
  options.rootRank = root;
  return options;
}

// Gives what rank `rank` brings: values small enough for every type's sums and products.
Tensor value(int rank, c10::IntArrayRef shape, torch::Dtype type) {
  const Tensor numbers = ((torch::arange(c10::multiply_integers(shape)) + rank) % 3 + 1).view(shape);
  return c10::isComplexType(type) ? torch::complex(numbers.to(torch::kDouble), -numbers.to(torch::kDouble)).to(type)
                                  : numbers.to(type);
}

Tensor reduced(const Tensors& all, ReduceOp::RedOpType op) {
  Tensor sum = all[0].clone();
  for (size_t i = 1; i < all.size(); ++i) {
    if (op == ReduceOp::MIN) sum = torch::minimum(sum, all[i]);
    if (op == ReduceOp::MAX) sum = torch::maximum(sum, all[i]);
    if (op == ReduceOp::PRODUCT) sum.mul_(all[i]);
    if (op == ReduceOp::SUM || op == ReduceOp::AVG) sum.add_(all[i]);
  }
  return op == ReduceOp::AVG ? sum.div_(static_cast<double>(all.size())) : sum;
}

void expect_equal(const Tensor& actual, const Tensor& expected) {
  const Tensor here = lockstep::on_host(actual).resolve_conj().resolve_neg();
  const bool equal = lockstep::on_real_gpus() && expected.is_floating_point() ? torch::allclose(here, expected, 1e-3, 0)
                                                                              : torch::equal(here, expected);
  EXPECT_TRUE(equal) << "actual\n" << actual << "\nexpected\n" << expected;
}

// ---- The kinds of tensors.

// The same values as a tensor of another kind.
struct Kind {
  const char* name;
  std::function<Tensor(const Tensor&)> of;
  bool by_nccl = false;  // takes it
};

Tensor as_it_is(const Tensor& tensor) {
  return tensor.clone();
}

const std::vector<Kind> kKinds = {
    {"contiguous", as_it_is, true},
    {"requires_grad",
     [](const Tensor& tensor) { return tensor.is_floating_point() ? tensor.clone().requires_grad_() : tensor.clone(); },
     true},
    {"transposed",
     [](const Tensor& tensor) {
       return tensor.dim() < 2 ? tensor.clone() : tensor.transpose(0, -1).contiguous().transpose(0, -1);
     }},
    {"channels last",
     [](const Tensor& tensor) {
       return tensor.dim() == 4 ? tensor.contiguous(torch::MemoryFormat::ChannelsLast) : tensor.clone();
     },
     true},
    {"a column of wider rows",
     [](const Tensor& tensor) {
       return torch::stack({tensor, tensor}, -1).select(-1, 0);
     }},
    {"every second value",
     [](const Tensor& tensor) {
       return tensor.dim() == 0 ? tensor.clone() : tensor.repeat_interleave(2, 0).slice(0, 0, std::nullopt, 2);
     }},
    {"negative bit", [](const Tensor& tensor) { return torch::_neg_view(tensor.neg()); }},
    {"conjugate bit", [](const Tensor& tensor) { return torch::conj(torch::conj_physical(tensor)); }},
};

// Around the ring.
template <class Of, class Blank, class Plain>
void expect_messages_right(Rank& rank, const Of& of, const Blank& blank, const Plain& plain) {
  const int world = rank.world_size(), me = rank.index(), previous = (me + world - 1) % world;
  if (world == 1) return;
  auto& backend = rank.backend();
  Tensors to_next{of(me)}, from_previous{blank()};
  const auto send = [&] { return backend.send(to_next, (me + 1) % world, 3); };
  const auto receive = [&] { return backend.recv(from_previous, previous, 3); };
  auto first = me == 0 ? send() : receive();  // NCCL's messages meet in this order
  auto second = me == 0 ? receive() : send();
  first->wait();
  second->wait();
  expect_equal(from_previous[0], plain(previous));
}

// Every call on tensors like value(…, shape, type), which kind_of() makes another kind of.
using KindOf = std::function<Tensor(const Tensor&)>;
void expect_calls_right(Rank& rank, const Shape& shape, torch::Dtype type, const KindOf& kind_of) {
  auto& backend = rank.backend();
  const int world = rank.world_size(), me = rank.index();
  const auto plain = [&](int who) { return value(who, shape, type); };
  const auto of = [&](int who) { return kind_of(plain(who).to(rank.device())); };
  const auto blank = [&] { return kind_of(torch::zeros(shape, type).to(rank.device())); };
  Tensors all, for_me;  // all ranks' values, and what all ranks bring for this one
  for (int who = 0; who < world; ++who) all.push_back(plain(who)), for_me.push_back(plain(who + me));

  std::vector<ReduceOp::RedOpType> ops = {ReduceOp::SUM};
  if (!c10::isIntegralType(type, /*includeBool=*/false)) ops.push_back(ReduceOp::AVG);
  if (!c10::isComplexType(type)) ops.insert(ops.end(), {ReduceOp::PRODUCT, ReduceOp::MIN, ReduceOp::MAX});
  for (const auto op : ops) {
    SCOPED_TRACE("reduction " + std::to_string(op));
    Tensors everywhere{of(me)};
    backend.allreduce(everywhere, with(op))->wait();
    expect_equal(everywhere[0], reduced(all, op));

    const int root = static_cast<int>(op) % world;
    Tensors at_root{of(me)};
    backend.reduce(at_root, to_root(root, op))->wait();
    if (me == root || !is_nccl(rank)) expect_equal(at_root[0], me == root ? reduced(all, op) : plain(me));

    std::vector<Tensors> parts(1);
    for (int who = 0; who < world; ++who) parts[0].push_back(of(me + who));
    Tensors part{blank()};
    backend.reduce_scatter(part, parts, with<c10d::ReduceScatterOptions>(op))->wait();
    expect_equal(part[0], reduced(for_me, op));
    for (int who = 0; who < world; ++who) expect_equal(parts[0][who], plain(me + who));
  }
  for (int root = 0; root < world; ++root) {
    Tensors tensor{of(me)};
    c10d::BroadcastOptions options;
    options.rootRank = root;
    backend.broadcast(tensor, options)->wait();
    expect_equal(tensor[0], plain(root));
  }
  Tensors mine{of(me)};
  std::vector<Tensors> gathered(1);
  for (int who = 0; who < world; ++who) gathered[0].push_back(blank());
  backend.allgather(gathered, mine)->wait();
  for (int who = 0; who < world; ++who) expect_equal(gathered[0][who], plain(who));

  Tensors to_all, from_all;
  for (int who = 0; who < world; ++who) to_all.push_back(of(me + who)), from_all.push_back(blank());
  backend.alltoall(from_all, to_all)->wait();
  for (int who = 0; who < world; ++who) expect_equal(from_all[who], plain(who + me));

  expect_messages_right(rank, of, blank, plain);
  if (shape.empty()) return;
  Shape whole_shape = shape;
  whole_shape[0] *= world;
  const auto blank_whole = [&] { return kind_of(torch::zeros(whole_shape, type).to(rank.device())); };
  Tensors rows;
  for (int who = 0; who < world; ++who) rows.push_back(plain(me + who));
  Tensor whole = blank_whole(), input = of(me);
  if (is_nccl(rank) && !whole.is_contiguous()) return;  // NCCL takes memory as it lies
  backend._allgather_base(whole, input)->wait();
  expect_equal(whole, torch::cat(all));

  Tensor in = kind_of(torch::cat(rows).to(rank.device())), out = blank();
  backend._reduce_scatter_base(out, in)->wait();
  expect_equal(out, reduced(for_me, ReduceOp::SUM));

  if (is_nccl(rank)) return;  // its stand-in has no alltoall_base
  Tensor exchanged = blank_whole();
  std::vector<int64_t> equal_parts;
  backend.alltoall_base(exchanged, in, equal_parts, equal_parts)->wait();
  expect_equal(exchanged, torch::cat(for_me));
}

TEST_P(C10dWorlds, EveryCallTakesEveryKindOfTensor) {
  const std::vector<Shape> shapes = {{}, {1}, {5}, {0}, {2, 0, 3}, {4, 3}, {2, 3, 2, 5}};
  lockstep::run(lockstep::test_devices(GetParam()), [&](Rank& rank) {
    for (size_t i = 0; i < kKinds.size(); ++i) {
      const Kind& kind = kKinds[i];
      const bool by_nccl = !is_nccl(rank) || kind.by_nccl;
      const std::string name = kind.name;
      const auto type = name == "conjugate bit" ? torch::kComplexFloat : torch::kFloat;
      if (!rank.device().is_cpu() && name.ends_with("bit")) continue;  // the simulated device does not know them
      for (const Shape& shape : shapes) {
        SCOPED_TRACE(name + ", " + c10::str(c10::IntArrayRef(shape)));
        if (by_nccl) expect_calls_right(rank, shape, type, kind.of);
      }
      SCOPED_TRACE(name + " on rank 0 alone");
      if (by_nccl) expect_calls_right(rank, {4, 3}, type, rank.index() == 0 ? kind.of : as_it_is);
    }
  });
}

TEST_P(C10dWorlds, EveryCallTakesEveryType) {
  lockstep::run(lockstep::test_devices(GetParam()), [&](Rank& rank) {
    for (const auto type : {torch::kDouble, torch::kHalf, torch::kBFloat16, torch::kInt8, torch::kUInt8, torch::kInt16,
                            torch::kInt32, torch::kInt64, torch::kComplexDouble}) {
      SCOPED_TRACE(c10::toString(type));
      if (type == torch::kComplexDouble && !rank.device().is_cpu()) continue;
      expect_calls_right(rank, {4, 3}, type, as_it_is);
      if (!is_nccl(rank)) expect_calls_right(rank, {4, 3}, type, kKinds[4].of);
    }
  });
}

// ---- What a caller of c10d relies on.

// c10d's test_barrier_implies_wait asks for the same.
TEST_P(C10dWorlds, WhatNobodyWaitsForIsDoneBeforeALaterCallAndAtTheEnd) {
  const int world = GetParam();
  if (world == 1) GTEST_SKIP() << "a rank sends itself nothing";
  const float sum = static_cast<float>(world * (world + 1)) / 2;
  Tensors left(static_cast<size_t>(world)), received(static_cast<size_t>(world));
  lockstep::run(lockstep::test_devices(world), [&](Rank& rank) {
    const bool nccl = is_nccl(rank);
    const auto mine = [&] {
      return nccl ? torch::full({3, 2}, rank.index() + 1.0F, rank.device())
                  : torch::full({2, 3}, rank.index() + 1.0F, rank.device()).t();
    };
    Tensors tensors{mine()};
    rank.backend().allreduce(tensors, with(ReduceOp::AVG));
    rank.backend().barrier()->wait();
    expect_equal(tensors[0], torch::full({3, 2}, sum / static_cast<float>(world)));

    if (lockstep::this_process().count == 1) {  // Gloo does several calls at once
      tensors = {torch::full({3, 2}, rank.index() + 1.0F, rank.device())};
      rank.backend().allreduce(tensors);
      rank.backend().allreduce(tensors, with(ReduceOp::MAX))->wait();
      expect_equal(tensors[0], torch::full({3, 2}, sum));
    }
    if (nccl) return;

    const auto me = static_cast<size_t>(rank.index());
    left[me] = mine();
    tensors = {left[me]};
    rank.backend().allreduce(tensors, with(ReduceOp::AVG));
    if (me == 0) {
      Tensors message{torch::full({2, 3}, 7.0F, rank.device()).t()};
      rank.backend().send(message, world - 1, 1);
    } else if (static_cast<int>(me) == world - 1) {
      received[me] = torch::zeros({2, 3}, rank.device()).t();
      Tensors message{received[me]};
      rank.backend().recv(message, 0, 1);
    }
  });
  for (const Tensor& tensor : left) {
    if (tensor.defined()) expect_equal(tensor, torch::full({3, 2}, sum / static_cast<float>(world)));
  }
  if (received.back().defined()) expect_equal(received.back(), torch::full({3, 2}, 7.0F));
}

TEST_P(C10dWorlds, InferenceModeOfAllRanksOrOfOneIsNoHindrance) {
  lockstep::run(lockstep::test_devices(GetParam()), [&](Rank& rank) {
    if (!rank.device().is_cpu()) return;
    for (const bool on_all : {true, false}) {
      const c10::InferenceMode mode(on_all || rank.index() == 1);
      expect_calls_right(rank, {4, 3}, torch::kFloat, as_it_is);
      expect_calls_right(rank, {4, 3}, torch::kFloat, kKinds[4].of);
    }
  });
}

TEST_P(C10dWorlds, TheSmallestAndTheLargestKeepANaN) {
  const float nan = std::numeric_limits<float>::quiet_NaN(), infinite = std::numeric_limits<float>::infinity();
  const int world = GetParam();
  lockstep::run(lockstep::test_devices(world), [&](Rank& rank) {
    for (const auto type : {torch::kFloat, torch::kDouble, torch::kHalf, torch::kBFloat16}) {
      for (const int who : {0, world - 1}) {
        Tensors all;
        for (int other = 0; other < world; ++other) {
          all.push_back(torch::tensor({other == who ? nan : 1.0F, -2.0F - other, other == who ? infinite : 5.0F,
                                       other == who ? -infinite : 0.5F, -0.25F * other, 3.0F + other})
                            .to(type));
        }
        for (const auto op : {ReduceOp::MIN, ReduceOp::MAX}) {
          Tensors mine{all[rank.index()].to(rank.device()).clone()};
          rank.backend().allreduce(mine, with(op))->wait();
          const Tensor here = mine[0].cpu(), expected = reduced(all, op);
          EXPECT_TRUE(std::isnan(here[0].item<float>())) << here;
          expect_equal(here.narrow(0, 1, 5), expected.narrow(0, 1, 5));
        }
      }
    }
  });
}

TEST_P(C10dWorlds, MessagesFromAnyRankAreTakenInTheOrderOfTheReceives) {
  if (GetParam() == 1) GTEST_SKIP() << "a rank sends itself nothing";
  lockstep::run(lockstep::test_devices(GetParam()), [&](Rank& rank) {
    constexpr int kTag = 0x4001;
    if (is_nccl(rank)) return;
    if (rank.index() == 1) {
      for (const float number : {1.0F, 2.0F, 3.0F}) {
        Tensors message{torch::full({2}, number, rank.device())};
        rank.backend().send(message, 0, kTag)->wait();
      }
    } else if (rank.index() == 0) {
      std::vector<Tensors> to;
      std::vector<c10::intrusive_ptr<c10d::Work>> works;
      for (int i = 0; i < 3; ++i) {
        to.push_back({torch::zeros({2}, rank.device())});
        works.push_back(rank.backend().recvAnysource(to.back(), kTag));
      }
      for (const size_t i : {1, 2, 0}) works[i]->wait();
      for (const size_t i : {0, 1, 2}) {
        expect_equal(to[i][0], torch::full({2}, static_cast<float>(i) + 1));
        EXPECT_EQ(works[i]->sourceRank(), 1);
      }
    }
  });
}

// A receive from one rank goes before one from any rank, whichever was posted first: Gloo has it so.
TEST_P(C10dWorlds, AMessageOfOneRankMayHaveATagThatIsReceivedFromAnyRankToo) {
  const int world = GetParam();
  if (world == 1) GTEST_SKIP() << "a rank sends itself nothing";
  lockstep::run(lockstep::test_devices(world), [&](Rank& rank) {
    constexpr int kTag = 0x4001;
    if (is_nccl(rank)) return;
    const int last = world - 1, me = rank.index();
    const auto number = [](int which, int from) { return torch::full({2}, 10.0F * which + from); };
    const auto send = [&](int which) {
      Tensors message{number(which, me).to(rank.device())};
      rank.backend().send(message, 0, kTag)->wait();
    };
    Tensors of_last{torch::zeros({2}, rank.device())}, of_any{torch::zeros({2}, rank.device())};
    const auto from_last = [&] { return rank.backend().recv(of_last, last, kTag); };
    const auto from_any = [&] { return rank.backend().recvAnysource(of_any, kTag); };
    for (const bool any_first : {true, false}) {
      if (me == 0) {
        const auto first = any_first ? from_any() : from_last(), second = any_first ? from_last() : from_any();
        rank.barrier();  // both wait by now
        first->wait();
        second->wait();
        expect_equal(of_last[0], number(1, last));
        expect_equal(of_any[0], number(2, last));
      } else {
        rank.barrier();
        if (me == last) send(1), send(2);
      }
      rank.barrier();
    }
    if (me != 0) return send(3);
    from_last()->wait();
    expect_equal(of_last[0], number(3, last));
    for (int left = last - 1; left > 0; --left) {
      const auto work = from_any();
      work->wait();
      EXPECT_LT(work->sourceRank(), last);
      expect_equal(of_any[0], number(3, work->sourceRank()));
    }
  });
}

// ---- What is refused.

TEST_P(C10dWorlds, WhatIsNotOfferedIsRefusedInOurWords) {
  lockstep::run(lockstep::test_devices(GetParam()), [&](Rank& rank) {
    auto& backend = rank.backend();
    const int me = rank.index(), world = rank.world_size();
    Tensor one = torch::ones({2}, rank.device());
    Tensors list{one}, none, two{one, one}, sparse{torch::ones({2}).to_sparse()}, undefined{Tensor()};
    const std::string not_there = " is rank " + std::to_string(world) + ", but the ranks are 0 to ";
    using Calls = std::vector<std::pair<std::string, std::function<void()>>>;
    const Calls mistakes = {
        {"allreduce takes one tensor per rank, got 0", [&] { backend.allreduce(none); }},
        {"broadcast takes one tensor per rank, got 2", [&] { backend.broadcast(two); }},
        {"allreduce's tensor is a sparse tensor", [&] { backend.allreduce(sparse); }},
        {"send's tensor is an undefined tensor", [&] { backend.send(undefined, (me + 1) % world, 1); }},
        {"send's peer" + not_there, [&] { backend.send(list, world, 1); }},
        {"recv: a rank cannot exchange messages with itself", [&] { backend.recv(list, me, 1); }},
        {"reduce's root" + not_there, [&] { backend.reduce(list, to_root(world, ReduceOp::SUM)); }}};
    for (const auto& [what, make] : mistakes) EXPECT_THAT(error_of(make), Refused()) << what;
    for (const int64_t tensor : {-1, 1}) {
      c10d::BroadcastOptions broadcast;
      broadcast.rootTensor = tensor;
      c10d::ReduceOptions reduce;
      reduce.rootTensor = tensor;
      EXPECT_THAT(error_of([&] { backend.broadcast(list, broadcast); }), Refused());
      EXPECT_THAT(error_of([&] { backend.reduce(list, reduce); }), Refused());
    }
    if (is_nccl(rank)) return;  // c10d's NCCL refuses the rest in its own words

    Tensors bytes{one.to(torch::kInt8)};
    Tensor whole = torch::ones({2 * world + 1}, rank.device());
    std::vector<Tensors> lists{list};
    const std::string no_call = "lockstep's backend does not offer c10d's ";
    const Calls calls = {
        {"allgather's output must hold", [&] { backend._allgather_base(whole, one); }},
        {"allreduce(bitwise xor) of float [2] is not offered: the reduction must be sum, avg, product, min or max",
         [&] { backend.allreduce(list, with(ReduceOp::BXOR)); }},
        {"allreduce(avg) of int8 [2]: an average of integers", [&] { backend.allreduce(bytes, with(ReduceOp::AVG)); }},
        {no_call + "gather; ", [&] { backend.gather(lists, list); }},
        {no_call + "scatter; ", [&] { backend.scatter(list, lists); }},
        {no_call + "allreduce_sparse; ", [&] { backend.allreduce_sparse(list); }},
        {no_call + "allreduce_coalesced; ", [&] { backend.allreduce_coalesced(list); }},
        {no_call + "allgather_coalesced; ", [&] { backend.allgather_coalesced(lists, list); }},
        {no_call + "allgather_into_tensor_coalesced; ", [&] { backend.allgather_into_tensor_coalesced(list, list); }},
        {no_call + "reduce_scatter_tensor_coalesced; ", [&] { backend.reduce_scatter_tensor_coalesced(list, list); }},
        {no_call + "monitoredBarrier; ", [&] { backend.monitoredBarrier({}); }},
        {no_call + "setTimeout; ", [&] { backend.setTimeout(std::chrono::seconds(1)); }},
        {no_call + "abort; ", [&] { backend.abort(); }},
        {no_call + "shutdown; ", [&] { backend.shutdown(); }}};
    for (const auto& [what, make] : calls) EXPECT_THAT(error_of(make), Refused()) << what;
    const auto work = backend.allreduce(list);
    work->wait();
    EXPECT_THAT(any_error_of([&] { work->sourceRank(); }), HasSubstr("recv"));
  });
}

TEST(C10dRefused, ATensorWithANegativeBitByNccl) {
  if (lockstep::test_devices(1)[0].is_cpu()) return;
  lockstep::run(lockstep::test_devices(2), [&](Rank& rank) {
    if (!is_nccl(rank)) return;
    Tensors tensor{torch::_neg_view(torch::full({2}, 3.0F, rank.device()))};
    EXPECT_THAT(error_of([&] { rank.backend().allreduce(tensor); }), Refused());
  });
}

// The rank's body goes on after the Error, and the others wait for it: they are told at once.
void expect_all_told(int world, const std::function<void(Rank&)>& call,
                     const testing::Matcher<const lockstep::Caught&>& what) {
  const auto begin = Clock::now();
  const auto error = error_of([&] {
    lockstep::run(lockstep::test_devices(world),
                  [&](Rank& rank) {
                    if (!rank.device().is_cpu()) throw lockstep::Error("left out");
                    try {
                      call(rank);
                    } catch (const lockstep::Error&) {
                      if (rank.index() != 1) throw;
                    }
                    rank.barrier();
                  },
                  {.timeout = std::chrono::minutes(4)});
  });
  if (error.find("left out") != std::string::npos) return;
  EXPECT_THAT(error, what);
  EXPECT_LT(Clock::now() - begin, std::chrono::minutes(2));
}

TEST_P(C10dWorlds, WhatARanksOwnCallDoesWrongIsToldAtOnceToAll) {
  if (GetParam() == 1) GTEST_SKIP() << "nobody else is told";
  const auto alltoall = [](Rank& rank) {  // rank 0 has more for rank 1 than that expects
    Tensors in, out;
    for (int other = 0; other < rank.world_size(); ++other) {
      in.push_back(torch::ones({rank.index() == 0 && other == 1 ? 3 : 2}));
      out.push_back(torch::ones({2}));
    }
    rank.backend().alltoall(out, in)->wait();
  };
  expect_all_told(GetParam(), alltoall, Fails(Error::difference));
  using Call = std::function<void(Rank&)>;
  const auto sum = [](const Tensor& tensor, ReduceOp::RedOpType op = ReduceOp::SUM) -> Call {
    return [=](Rank& rank) { rank.allreduce(tensor.clone(), op); };
  };
  const auto broadcast = [](int root) -> Call { return [=](Rank& rank) { rank.broadcast(torch::ones({2}), root); }; };
  const Call send = [](Rank& rank) {
    Tensors message{torch::ones({2})};
    if (rank.index() == 0) rank.backend().send(message, 1, 1)->wait();
  };
  const auto recv = [](const Tensor& like) -> Call {
    return [=](Rank& rank) {
      Tensors message{like.clone()};
      rank.backend().recv(message, 0, 1)->wait();
    };
  };
  const Tensor two = torch::ones({2}), column = torch::ones({2, 1}), three = torch::ones({3});
  const std::vector<std::pair<Call, Call>> differing = {{sum(two), sum(column)},
                                                        {sum(two), sum(three)},
                                                        {sum(two), sum(two.to(torch::kInt32))},
                                                        {sum(two), sum(two, ReduceOp::MAX)},
                                                        {sum(two), broadcast(0)},
                                                        {broadcast(0), broadcast(1)},
                                                        {send, recv(column)},
                                                        {send, recv(three)},
                                                        {send, recv(three.narrow(0, 0, 1))},
                                                        {send, recv(two.to(torch::kInt32))}};
  for (const auto& calls : differing) {
    const auto make = [&](Rank& rank) { (rank.index() == 1 ? calls.second : calls.first)(rank); };
    expect_all_told(GetParam(), make, Fails(Error::difference));
  }
  const auto no_sum = [](Rank& rank) { rank.allreduce(torch::ones({2}).to(torch::kUInt16)); };
  expect_all_told(GetParam(), no_sum, AnyOf(Fails(Error::refused), Fails(Error::machine)));
  const auto too_large = [](Rank& rank) {  // its copy would have more bytes than 64 bits count
    Tensors message{torch::ones({1}).expand({int64_t{1} << 62})};
    if (rank.index() < 2) rank.backend().send(message, 1 - rank.index(), 1)->wait();
  };
  expect_all_told(GetParam(), too_large, AnyOf(Fails(Error::machine), Fails(Error::user_code)));
}

TEST_P(C10dWorlds, ABackendThatIsKeptBeyondItsRunSaysSo) {
  std::vector<c10::intrusive_ptr<c10d::Backend>> kept(static_cast<size_t>(GetParam()));
  Tensors tensors(kept.size());
  lockstep::run(lockstep::test_devices(GetParam()), [&](Rank& rank) {
    rank.barrier();
    const auto me = static_cast<size_t>(rank.index());
    kept[me] = c10::intrusive_ptr<c10d::Backend>::reclaim_copy(&rank.backend());
    tensors[me] = torch::ones({2}, rank.device());
  });
  for (size_t rank = 0; rank < kept.size(); ++rank) {
    if (!kept[rank]) continue;
    Tensors tensor{tensors[rank]};
    EXPECT_THAT(error_of([&] { kept[rank]->allreduce(tensor)->wait(std::chrono::seconds(1)); }), Refused());
  }
}

}  // namespace c10d_cases_test

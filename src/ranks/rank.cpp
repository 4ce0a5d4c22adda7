#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <lockstep/base/error.hpp>
#include <lockstep/ranks/rank.hpp>

#include "base/classic.hpp"
#include "base/rank_thread.hpp"
#include "comm/members.hpp"
#include "comm/purpose.hpp"
#include "comm/reduction.hpp"
#include "comm/world.hpp"
#include "gather.hpp"
#include "rank_place.hpp"
#include "shared_generator.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <vector>

namespace lockstep {
namespace {

// NCCL refuses tensors whose memory is in another order than their dimensions, and reads only memory, without
// LibTorch's negative and conjugate bits. So such tensors are sent as a copy.
at::Tensor in_order(const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  return tensor.defined() && tensor.layout() == at::kStrided ? comm::in_a_row(tensor) : tensor;
}

void put_back(const at::Tensor& packed, at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  if (!packed.is_same(tensor)) tensor.copy_(packed);
}

// Throws no Error, since the tensor may only be a value to look at. Parameters have no graph.
void warn_of_graph(const Rank& rank, const at::Tensor& tensor, const std::string& call) {
  if (!at::GradMode::is_enabled() || !tensor.defined() || !tensor.grad_fn()) return;
  const comm::RankPlace& place = comm::RankPlace::of(rank);
  if (place.run->told_of_graph.exchange(true)) return;
  place.warn(
      call +
      "() of a tensor with a graph: no gradient flows through it, so what is computed from the result trains "
      "with wrong gradients. Take allreduce_with_gradient() or allgather_with_gradient() (ranks/functional.hpp) where "
      "a gradient is to flow, and detach() where it is only a value");
}

}  // namespace

Rank::Rank(std::shared_ptr<comm::RankPlace> place, c10::intrusive_ptr<c10d::Backend> backend)
    : place_(std::move(place)),
      index_(place_->members.index_of(place_->world_rank)),
      world_size_(place_->members.size()),
      device_(place_->run->devices[place_->world_rank]),
      backend_(std::move(backend)) {}

std::string Rank::name() const {
  return comm::name_of(place_->world_rank, place_->run->devices);
}

c10d::Backend& Rank::backend() {
  ++calls_of_this_thread();
  place_->world().check(place_->world_rank);
  return *backend_;
}

int Rank::process() const {
  return place_->run->process;
}

int Rank::index_in_process() const {
  const auto& ranks = place_->members.ranks;
  const auto first = place_->run->ranks_here.begin;
  return static_cast<int>(
      std::count_if(ranks.begin(), ranks.begin() + index_, [&](int rank) { return rank >= first; }));
}

uint64_t Rank::seed() const {
  return place_->random.seed;
}

at::Generator Rank::generator() const {
  return place_->random.generator;
}

void Rank::end_turn() {
  keep_shared_seed(*this);
}

Rank Rank::group(int color) {
  if (color < 0) throw Error(name() + ": group: the color is " + std::to_string(color) + "; colors start at 0");
  const at::Tensor colors = allgather(at::full({}, color, at::TensorOptions(device_).dtype(at::kLong))).cpu();
  place_->world().check_values(place_->world_rank);

  comm::Members group{place_->members.name + "/" + std::to_string(place_->groups++) + "." + std::to_string(color), {}};
  for (int other = 0; other < world_size_; ++other) {
    if (colors[other].item<int64_t>() == color) group.ranks.push_back(place_->members.ranks[other]);
  }
  const Rank made = comm::RankPlace::rank(place_->run, place_->world_rank, std::move(group), place_->random);
  return wrap_ ? made.wrapped(wrap_) : made;
}

Rank Rank::wrapped(Wrap wrap) const {
  Rank copy = *this;
  place_->world();
  copy.backend_ = wrap(backend_);
  copy.index_ = copy.backend_->getRank();
  copy.world_size_ = copy.backend_->getSize();
  if (!wrap_) {
    copy.wrap_ = std::move(wrap);
  } else {
    copy.wrap_ = [inner = wrap_, outer = std::move(wrap)](auto backend) { return outer(inner(std::move(backend))); };
  }
  return copy;
}

void Rank::allreduce(at::Tensor tensor, c10d::ReduceOp op) {
  warn_of_graph(*this, tensor, "allreduce");
  std::vector<at::Tensor> packed{in_order(tensor)};
  c10d::AllreduceOptions options;
  options.reduceOp = std::move(op);
  backend().allreduce(packed, options)->wait();
  place_->world().check(place_->world_rank);
  put_back(packed[0], tensor);
}

void Rank::broadcast(at::Tensor tensor, int root) {
  warn_of_graph(*this, tensor, "broadcast");
  std::vector<at::Tensor> packed{in_order(tensor)};
  c10d::BroadcastOptions options;
  options.rootRank = root;
  backend().broadcast(packed, options)->wait();
  place_->world().check(place_->world_rank);
  put_back(packed[0], tensor);
}

at::Tensor Rank::allgather(const at::Tensor& tensor) {
  warn_of_graph(*this, tensor, "allgather");
  const at::NoGradGuard no_grad;
  at::Tensor mine = comm::in_a_row(tensor);
  auto sizes = mine.sizes().vec();
  sizes.insert(sizes.begin(), world_size_);
  at::Tensor all = at::empty(sizes, mine.options());
  at::Tensor flat = all.view({-1}), flat_mine = mine.view({-1});
  backend()._allgather_base(flat, flat_mine)->wait();
  place_->world().check(place_->world_rank);
  return all;
}

at::Tensor Rank::reduce_scatter(const at::Tensor& tensor, c10d::ReduceOp op) {
  warn_of_graph(*this, tensor, "reduce_scatter");
  const at::NoGradGuard no_grad;
  if (tensor.dim() == 0 || tensor.size(0) != world_size_) {
    throw Error(name() + ": reduce_scatter: the tensor " + classic_text(tensor.sizes()) + " needs a row for each of " +
                std::to_string(world_size_) + " ranks");
  }
  at::Tensor all = comm::in_a_row(tensor).view({-1});
  at::Tensor mine = at::empty(tensor.sizes().slice(1), tensor.options().memory_format(at::MemoryFormat::Contiguous));
  at::Tensor flat_mine = mine.view({-1});
  c10d::ReduceScatterOptions options;
  options.reduceOp = std::move(op);
  backend()._reduce_scatter_base(flat_mine, all, options)->wait();
  place_->world().check(place_->world_rank);
  return mine;
}

double Rank::mean(double value, double weight) {
  const std::string use = "mean()";
  const comm::Purpose purpose(use);
  const at::Tensor all = of_all_ranks(*this, {bits_of(value), bits_of(weight)});
  double sum = 0, weights = 0;
  for (int rank = 0; rank < world_size_; ++rank) {
    const auto number = [&](int column) { return std::bit_cast<double>(all[rank][column].item<int64_t>()); };
    if (!(number(1) >= 0 && std::isfinite(number(1)))) {
      throw Error(name() + ": mean: the weight of rank " + std::to_string(rank) + " is " + std::to_string(number(1)) +
                  "; give a number of samples, at least 0");
    }
    if (number(1) == 0) continue;  // a rank without samples may have NaN for their mean
    sum += number(0) * number(1);
    weights += number(1);
  }
  if (weights == 0) throw Error(name() + ": mean: the weights of all ranks are 0, so there is nothing to average");
  return sum / weights;
}

bool Rank::any(bool value) {
  const std::string use = "any()";
  const comm::Purpose purpose(use);
  return of_all_ranks(*this, {value}).any().item<bool>();
}

std::string Rank::broadcast(const std::string& text, int root) {
  return shared_text(text, *this, root);
}

void Rank::barrier() {
  backend().barrier(c10d::BarrierOptions{})->wait();
  place_->world().check_values(place_->world_rank);
}

}  // namespace lockstep

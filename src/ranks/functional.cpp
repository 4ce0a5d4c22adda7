#include <ATen/WrapDimUtils.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>
#include <lockstep/base/error.hpp>
#include <lockstep/ranks/functional.hpp>

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "base/classic.hpp"
#include "data/parts.hpp"
#include "equal_input.hpp"
#include "gather.hpp"
#include "rank_place.hpp"

namespace lockstep {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Holds the values that a function and its conjugate need in addition to x.
struct Exchanged {
  Rank rank;
  int64_t dim = 0;
  std::vector<int64_t> sizes = {};  // the sizes of the ranks' slices along dim
  bool compares = false;            // a backward that wants equal gradients compares them
};

struct KeptForBackward : torch::CustomClassHolder {
  explicit KeptForBackward(Exchanged exchanged) : exchanged(std::move(exchanged)) {}
  Exchanged exchanged;
};

// ---- How much of a dimension each rank holds -----------------------------------------------------------------------

// Returns the sizes of all ranks' slices of `total`, as part_of cuts it.
std::vector<int64_t> equal_sizes(int64_t total, const Rank& rank) {
  std::vector<int64_t> sizes;
  for (int i = 0; i < rank.world_size(); ++i) sizes.push_back(part_of(total, i, rank.world_size()).size());
  return sizes;
}

// Returns every rank's x.size(dim). Where a rank's x has no graph, it would stay away from the others' backward.
std::vector<int64_t> asked_sizes(const char* function, const Tensor& x, int64_t dim, Rank& rank) {
  const Tensor all = of_all_ranks(rank, {x.size(dim), x.requires_grad() && at::GradMode::is_enabled() ? 1 : 0});
  const Tensor sizes = all.select(1, 0).contiguous(), graphs = all.select(1, 1);
  if (!graphs.eq(graphs[0]).all().item<bool>()) {
    throw Error(std::string(function) + ": x has a graph on some ranks only, here " +
                (x.requires_grad() ? "a graph" : "none") +
                ", so backward would wait for the others. Compute x with gradients on all ranks: a rank without "
                "samples passes its empty batch through the net");
  }
  return {sizes.const_data_ptr<int64_t>(), sizes.const_data_ptr<int64_t>() + sizes.numel()};
}

// Returns every rank's x.size(dim), as part_of cuts `total`. If `total` is 0, the ranks ask each other.
std::vector<int64_t> sizes_in_group(const char* function, const Tensor& x, int64_t dim, Rank& rank, int64_t total) {
  if (total == 0) return asked_sizes(function, x, dim, rank);
  const int64_t mine = x.size(dim);
  std::vector<int64_t> sizes = equal_sizes(total, rank);
  if (sizes[rank.index()] == mine) return sizes;
  throw Error(std::string(function) + ": x is " + classic_text(x.sizes()) + ", but rank " +
              std::to_string(rank.index()) + " of " + std::to_string(rank.world_size()) + " has " +
              std::to_string(sizes[rank.index()]) + " of " + std::to_string(total) + " along dimension " +
              std::to_string(dim) + "; give each rank its part_of(total), or no total");
}

// ---- Without gradients ---------------------------------------------------------------------------------------------

Tensor unchanged(const Tensor& x, Exchanged&) {
  return x;
}

Tensor sum_over_group(const Tensor& x, Exchanged& how) {
  const Tensor sum = x.detach().clone();
  how.rank.allreduce(sum);
  return sum;
}

Tensor own_slice(const Tensor& x, Exchanged& how) {
  const int index = how.rank.index();
  const int64_t begin = std::accumulate(how.sizes.begin(), how.sizes.begin() + index, int64_t{0});
  return x.narrow(how.dim, begin, how.sizes[index]).clone();
}

// An allgather takes slices of one size, so smaller ones are filled up with zeros on the way.
Tensor join(const Tensor& x, Exchanged& how) {
  const int64_t largest = *std::max_element(how.sizes.begin(), how.sizes.end());
  Tensor mine = x.detach().contiguous();
  if (mine.size(how.dim) < largest) {
    auto missing = mine.sizes().vec();
    missing[how.dim] = largest - mine.size(how.dim);
    mine = at::cat({mine, at::zeros(missing, mine.options())}, how.dim);
  }
  std::vector<Tensor> input{mine};
  std::vector<std::vector<Tensor>> slices(1);
  for (size_t i = 0; i < how.sizes.size(); ++i) slices[0].push_back(at::empty(mine.sizes(), mine.options()));
  how.rank.backend().allgather(slices, input, c10d::AllgatherOptions{})->wait();
  for (size_t i = 0; i < how.sizes.size(); ++i) slices[0][i] = slices[0][i].narrow(how.dim, 0, how.sizes[i]);
  return at::cat(slices[0], how.dim);
}

Tensor own_slice_of_sum(const Tensor& x, Exchanged& how) {
  const bool equal = std::equal(how.sizes.begin() + 1, how.sizes.end(), how.sizes.begin());
  if (!equal) return own_slice(sum_over_group(x, how), how);  // a reduce_scatter gives slices of one size
  std::vector<std::vector<Tensor>> slices{x.detach().split_with_sizes(how.sizes, how.dim)};
  for (auto& slice : slices[0]) slice = slice.contiguous();
  std::vector<Tensor> output{at::empty(slices[0][0].sizes(), x.options())};
  how.rank.backend().reduce_scatter(output, slices, c10d::ReduceScatterOptions{})->wait();
  return output[0];
}

// ---- Gradients that must be equal ----------------------------------------------------------------------------------

// Throws Error where gather_from_group's gradients are wrong.
void check_equal(const Tensor& gradient, Exchanged& how) {
  const auto& place = comm::RankPlace::of(how.rank);
  const std::string remedy =
      ". Take allgather_with_gradient() (ranks/functional.hpp), whose backward adds the ranks' gradients; "
      "gather_from_group() is for layers that divide their work";
  if (place.averages) {
    throw Error(how.rank.name() +
                ": gather_from_group: a DataParallel averages over the same ranks, so each output's gradient would be "
                "divided by the number of ranks" +
                remedy);
  }
  if (!how.compares) return;
  const auto other = rank_with_another_input(gradient, how.rank, 2 * ++place.gathered_backwards);
  if (!other) return;
  throw Error(how.rank.name() +
                  ": gather_from_group: the gradient of the joined tensor differs between the ranks 0 and " +
                  std::to_string(*other) + " of the group, and each rank would keep its own" + remedy,
              {Error::difference});
}

// ---- With gradients: each by its conjugate -------------------------------------------------------------------------

// The conjugate's own conjugate is the operation, so each can be differentiated any number of times.
template <auto compute, auto conjugate>
class Differentiable : public torch::autograd::Function<Differentiable<compute, conjugate>> {
 public:
  static Tensor forward(AutogradContext* ctx, const Tensor& x, Exchanged how) {
    ctx->saved_data["how"] = c10::IValue::make_capsule(c10::make_intrusive<KeptForBackward>(how));
    return compute(x, how);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const auto kept = c10::static_intrusive_pointer_cast<KeptForBackward>(ctx->saved_data.at("how").toCapsule());
    // A rank takes a slice of its own gradient alone, so the ranks' gradients must be equal.
    if constexpr (conjugate == own_slice) check_equal(gradients[0], kept->exchanged);
    return {Differentiable<conjugate, compute>::apply(gradients[0], kept->exchanged), Tensor()};
  }
};

using CopyTo = Differentiable<unchanged, sum_over_group>;
using ReduceFrom = Differentiable<sum_over_group, unchanged>;
using GatherFrom = Differentiable<join, own_slice>;
using ScatterTo = Differentiable<own_slice, join>;
using GatherAll = Differentiable<join, own_slice_of_sum>;

int64_t checked_dim(const char* function, const Tensor& x, int64_t dim) {
  if (dim >= -x.dim() && dim < x.dim()) return at::maybe_wrap_dim(dim, x.dim());
  throw Error(std::string(function) + ": x is " + classic_text(x.sizes()) + "; it has no dimension " +
              std::to_string(dim));
}

// Joins the ranks' slices, which may differ in size, to one tensor.
template <class Gather>
Tensor joined(const char* name, const Tensor& x, int64_t dim, Rank& rank, int64_t total) {
  dim = checked_dim(name, x, dim);
  if (rank.world_size() == 1) return x;
  auto sizes = sizes_in_group(name, x, dim, rank, total);
  return Gather::apply(x, Exchanged{rank, dim, std::move(sizes), total == 0});
}

}  // namespace

Tensor copy_to_group(const Tensor& x, Rank& rank) {
  return rank.world_size() == 1 ? x : CopyTo::apply(x, Exchanged{rank});
}

Tensor reduce_from_group(const Tensor& x, Rank& rank) {
  return rank.world_size() == 1 ? x : ReduceFrom::apply(x, Exchanged{rank});
}

Tensor allgather_with_gradient(const Tensor& x, Rank& rank, int64_t dim, int64_t total) {
  return joined<GatherAll>("allgather_with_gradient", x, dim, rank, total);
}

Tensor allreduce_with_gradient(const Tensor& x, Rank& rank) {
  return copy_to_group(reduce_from_group(x, rank), rank);
}

Tensor gather_from_group(const Tensor& x, int64_t dim, Rank& rank, int64_t total) {
  return joined<GatherFrom>("gather_from_group", x, dim, rank, total);
}

Tensor scatter_to_group(const Tensor& x, int64_t dim, Rank& rank) {
  dim = checked_dim("scatter_to_group", x, dim);
  if (rank.world_size() == 1) return x;
  return ScatterTo::apply(x, Exchanged{rank, dim, equal_sizes(x.size(dim), rank)});
}

}  // namespace lockstep

#include "stand_in.hpp"

#include <ATen/ops/cat.h>
#include <lockstep/base/error.hpp>

#include "base/classic.hpp"
#include "data/batch_tensors.hpp"

#include <algorithm>
#include <string>
#include <utility>

namespace lockstep {
namespace {

// Gives the first `count` rows; if there are fewer, the first one again in place of the missing ones.
at::Tensor rows_of(const at::Tensor& tensor, int64_t count) {
  if (tensor.size(0) >= count) return tensor.slice(0, 0, count).clone();
  return at::cat(std::vector<at::Tensor>(static_cast<size_t>(count), tensor.slice(0, 0, 1)));
}

bool is_like(const at::Tensor& one, const at::Tensor& other) {
  if (!one.defined() || !other.defined()) return one.defined() == other.defined();
  return one.scalar_type() == other.scalar_type() && one.device() == other.device() && one.dim() == other.dim() &&
         one.sizes().slice(1) == other.sizes().slice(1);
}

std::string kind_text(const at::Tensor& tensor) {
  if (!tensor.defined()) return "is not there";
  return classic_text("is ", tensor.scalar_type(), " of sizes ", tensor.sizes(), " on ", tensor.device());
}

// A loop may change a batch and forget the example. Otherwise only the rank without samples would fail, within a layer.
void check_example(const Batch& part, const Rank& rank) {
  const auto check = [&](const std::string& name, const at::Tensor& example, const at::Tensor& rows) {
    if (is_like(example, rows)) return;
    throw Error(rank.name() + ": DataParallel: this rank has no samples of the batch, and computes the example that " +
                "Batch::like gives; but batch.like." + name + " " + kind_text(example) + ", and batch." + name + " " +
                kind_text(rows) + ". Do to batch.like." + name + " what you did to batch." + name);
  };
  const auto at_name = [](const Dataset::Tensors& tensors, const std::string& name) {
    const auto found = tensors.find(name);
    return found == tensors.end() ? at::Tensor() : found->second;
  };
  check("x", part.like.x, part.x);
  check("y", part.like.y, part.y);
  for (const auto& [name, rows] : part.more) check("more[\"" + name + "\"]", at_name(part.like.more, name), rows);
}

}  // namespace

Batch stand_in_for(const Batch& part, const Rank& rank) {
  Batch stand_in = part;
  if (part.size() == 0) {
    if (!part.like.x.defined()) {
      throw Error(rank.name() +
                  ": DataParallel: this rank has no samples of the batch, and with Sharded::parameters all ranks "
                  "compute the layers. It needs an example for that: take batches(), or give one sample in "
                  "Batch::like");
    }
    check_example(part, rank);
    stand_in.x = part.like.x;
    stand_in.y = part.like.y;
    stand_in.more = part.like.more;
  }
  const int64_t count = std::min<int64_t>(part.grain, 2);
  stand_in = with_each_tensor(std::move(stand_in), [&](const at::Tensor& tensor) { return rows_of(tensor, count); });
  stand_in.first = 0;
  return stand_in;
}

}  // namespace lockstep

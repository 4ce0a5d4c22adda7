#include <ATen/WrapDimUtils.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/bitwise_right_shift.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/feature_dropout.h>
#include <c10/core/GradMode.h>
#include <c10/util/accumulate.h>
#include <lockstep/base/error.hpp>
#include <lockstep/nn/dropout.hpp>
#include <lockstep/nn/sample_scope.hpp>

#include "base/classic.hpp"
#include "base/number_text.hpp"
#include "base/rank_thread.hpp"
#include "base/scramble.hpp"
#include "data/parts.hpp"
#include "devices/cuda_graph.hpp"
#include "recorded_draws.hpp"

#include <algorithm>
#include <initializer_list>
#include <limits>
#include <ostream>
#include <utility>
#include <vector>

namespace lockstep {
namespace {

int64_t as_signed(uint64_t bits) {
  return static_cast<int64_t>(bits);
}

// Computes scramble() of every value. LibTorch has no unsigned 64-bit numbers, and shifts signed ones with their sign.
at::Tensor scrambled(at::Tensor z) {
  const auto shifted = [&z](int64_t by) {
    return at::bitwise_right_shift(z, by).bitwise_and_((int64_t{1} << (64 - by)) - 1);
  };
  z.bitwise_xor_(shifted(30)).mul_(as_signed(kScramble[0]));
  z.bitwise_xor_(shifted(27)).mul_(as_signed(kScramble[1]));
  return z.bitwise_xor_(shifted(31));
}

// Computes FNV-1a, which is the same on every machine.
uint64_t hash_of(const std::string& name) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const unsigned char letter : name) hash = (hash ^ letter) * 0x100000001b3;
  return hash;
}

// Gives the key of a draw: mix() of what tells it from others, the step, and the batch if the step has several.
uint64_t key_of(std::initializer_list<uint64_t> draw, const SampleScope::Place& place) {
  const uint64_t key = scramble(mix(draw) + static_cast<uint64_t>(place.step) + kGolden);
  return place.batch > 0 ? mix({key, static_cast<uint64_t>(place.batch)}) : key;
}

// Gives the same number on the device, for a step that is known there alone.
at::Tensor key_of(std::initializer_list<uint64_t> draw, const at::Tensor& step, int64_t batch) {
  const at::Tensor key = scrambled(step + as_signed(mix(draw) + kGolden));
  if (batch == 0) return key;
  return scrambled(scrambled(key + as_signed(kGolden)) + as_signed(static_cast<uint64_t>(batch) + kGolden));
}

}  // namespace

DropoutImpl::DropoutImpl(const DropoutImpl::Options& options) : options(options) {
  if (options.p >= 0 && options.p <= 1) return;
  throw Error("Dropout: p is " + number_text(options.p) + "; it must be from 0 to 1");
}

void DropoutImpl::pretty_print(std::ostream& out) const {
  out << "lockstep::Dropout(p=" << options.p << (options.whole_channels ? ", whole_channels=true" : "") << ")";
}

at::Tensor DropoutImpl::forward(const at::Tensor& x) {
  if (!is_training() || options.p == 0 || x.numel() == 0) return x;
  if (options.p == 1) return x * 0;
  if (SampleScope::current() == nullptr && !is_rank_thread()) {
    return options.whole_channels ? at::feature_dropout(x, options.p, true) : at::dropout(x, options.p, true);
  }
  return x * mask(x);
}

at::Tensor DropoutImpl::mask(const at::Tensor& x) const {
  const c10::NoGradGuard no_grad;
  const std::string who = name_.empty() ? "Dropout" : "Dropout " + name_;
  SampleScope* const scope = SampleScope::current();
  if (scope == nullptr) {
    throw Error(
        who +
        ": which samples these are is not known, so that no mask can depend on them alone. Let "
        "DataParallel::loss() call forward, or open a SampleScope around it, as samples(batch) of a DataParallel or a "
        "Worker does; if backward computes this again, open it with what SampleScope::keep() gave in forward; to "
        "evaluate, call eval() first");
  }
  const SampleScope::Place& place = scope->place();
  if (place.first < 0) {
    throw Error(who +
                ": where its samples stand in the global batch is not known. Give Batch::first, as batches() and "
                "Batch::in_parts() do");
  }
  if (x.dim() == 0 || place.size < 1 || x.size(0) % place.size != 0) {
    throw Error(who + ": its input is " + classic_text(x.sizes()) + ", and the samples are " +
                std::to_string(place.size) + "; the first dimension must be the samples, or several rows of each");
  }
  const at::Tensor recorded_step = RecordedDraws::step();
  if (x.is_cuda() && is_recording() && !recorded_step.defined()) {
    throw Error(who + ": a CUDA graph would repeat the mask that it was recorded with; record steps without dropout");
  }
  const auto draw = scope->draw(this);
  const uint64_t layer = name_.empty() ? static_cast<uint64_t>(draw.layer) : hash_of(name_);
  const std::initializer_list<uint64_t> of_draw{place.seed, layer, static_cast<uint64_t>(draw.call)};

  // These are the places of a sample's values in the whole sample.
  std::vector<int64_t> sizes(x.sizes().begin() + 1, x.sizes().end());
  if (options.whole_channels) std::fill(sizes.begin() + std::min<ptrdiff_t>(1, x.dim() - 1), sizes.end(), 1);
  std::vector<int64_t> whole = sizes;
  const auto numbers = at::TensorOptions(x.device()).dtype(at::kLong);
  std::optional<std::pair<int64_t, Range>> mine;
  if (const int64_t dim = options.slice ? at::maybe_wrap_dim(options.slice->dim, x.dim()) : 0;
      dim == 1 || (dim > 1 && !options.whole_channels)) {
    const auto& slice = *options.slice;
    const int64_t total = slice.total > 0 ? slice.total : x.size(dim) * slice.count;
    whole.at(static_cast<size_t>(dim - 1)) = total;
    mine.emplace(dim - 1, part_of(total, slice.index, slice.count));
  }
  at::Tensor values = at::arange(c10::multiply_integers(whole), numbers).view(whole);
  if (mine) values = values.narrow(mine->first, mine->second.begin, mine->second.size());

  const int64_t rows = x.size(0), first = place.first * (rows / place.size);
  std::vector<int64_t> column(static_cast<size_t>(x.dim()), 1);
  column[0] = rows;
  const at::Tensor places = at::arange(first, first + rows, numbers).mul_(as_signed(kGolden));
  const at::Tensor keys = scrambled(recorded_step.defined() ? places.add_(key_of(of_draw, recorded_step, place.batch))
                                                            : places.add_(as_signed(key_of(of_draw, place))))
                              .view(column);
  const at::Tensor random =
      scrambled(keys + values * as_signed(kGolden)).bitwise_and_(std::numeric_limits<int64_t>::max());  // 63 bits
  const double kept = std::min(1 - options.p, 1 - 0x1p-53);
  return random.lt(static_cast<int64_t>(kept * 0x1p63)).to(x.scalar_type()).div_(kept);
}

}  // namespace lockstep

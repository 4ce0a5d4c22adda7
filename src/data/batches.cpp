// Batches: chooses each batch's samples, gathers or reads them, and makes the mark by which ranks compare batches.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Functions.h>
#include <lockstep/base/error.hpp>
#include <lockstep/data/data.hpp>

#include <algorithm>
#include <functional>
#include <numeric>
#include <string_view>
#include <utility>
#include <vector>

#include "base/rank_thread.hpp"
#include "base/scramble.hpp"
#include "batch_tensors.hpp"
#include "devices/upload.hpp"
#include "images_as_floats.hpp"
#include "latest_batch.hpp"
#include "parts.hpp"
#include "read_ahead.hpp"
#include "row_numbers.hpp"
#include "sizes_text.hpp"

namespace lockstep {
namespace {

void check_tensors(const Dataset& dataset) {
  const auto& [x, y, more] = dataset;
  if (!x.defined() || !y.defined() || x.dim() == 0 || y.dim() == 0) {
    throw Error("batches: x and y must be tensors of samples [n, ...]");
  }
  if (x.size(0) != y.size(0)) {
    throw Error("batches: x has " + std::to_string(x.size(0)) + " samples, but y has " + std::to_string(y.size(0)));
  }
  if (x.device() != y.device()) {
    throw Error("batches: x is on " + x.device().str() + ", but y is on " + y.device().str());
  }
  // Data without height and width are a table or a text. Numbers or tokens divided by 255 would train all the same.
  if (x.scalar_type() == at::kByte && x.dim() < 3) {
    throw Error("batches: x is uint8 " + sizes_text(x) +
                ", and uint8 becomes floats from 0 to 1 only as pixels, [n, …, height, width]; give a table as "
                "x.to(at::kFloat), tokens as x.to(at::kLong), pixels in one row as x.to(at::kFloat).div(255)");
  }
  for (const auto& [name, tensor] : more) {
    if (tensor.defined() && tensor.dim() > 0 && tensor.size(0) == x.size(0) && tensor.device() == x.device()) continue;
    throw Error("batches: x is " + sizes_text(x) + " on " + x.device().str() + ", and \"" + name + "\" is " +
                sizes_text(tensor) + (tensor.defined() ? " on " + tensor.device().str() : "") +
                "; it must have a row for each sample, on the same device");
  }
}

// Hashes an order that depends on more than seed and epoch.
uint64_t hash_of_order(const at::Tensor& order) {
  const auto* const numbers = order.const_data_ptr<int64_t>();
  uint64_t hash = 1;
  for (int64_t i = 0; i < order.numel(); ++i) hash = scramble(hash + static_cast<uint64_t>(numbers[i]) + kGolden);
  return hash;
}

constexpr int64_t kRowsDigested = 8;
constexpr size_t kBytesDigested = 256;  // bytes digested of a row

// Digests some rows of a whole batch, if they are whole numbers. Floats may come from unequal CPUs, with other last
// bits.
uint64_t digest_of_rows(const at::Tensor& data, const at::Tensor& order, int64_t begin, int64_t size) {
  if (!data.is_cpu() || !data.is_contiguous() || !at::isIntegralType(data.scalar_type(), /*includeBool=*/true))
    return 0;
  const size_t row_bytes = data.nbytes() / static_cast<size_t>(data.size(0));
  const auto* const bytes = static_cast<const char*>(data.const_data_ptr());
  uint64_t digest = 1;
  for (int64_t row = begin; row < begin + std::min(size, kRowsDigested); ++row) {
    const int64_t number = order.defined() ? order.const_data_ptr<int64_t>()[row] : row;
    const std::string_view values(bytes + static_cast<size_t>(number) * row_bytes, std::min(row_bytes, kBytesDigested));
    digest = mix({digest, std::hash<std::string_view>()(values)});
  }
  return digest;
}

}  // namespace

Batches::Batches(Samples samples, const BatchOptions& options, const Batches::Partner& partner)
    : samples_(std::move(samples)), options_(options), partner_(partner) {
  if (samples_.in_memory()) check_tensors(samples_.tensors());
  if (options.size < 1) throw Error("batches: batch size " + std::to_string(options.size) + "; expected 1 or more");
  if (options.drop_last && options.size > samples_.size()) {
    throw Error("batches: with drop_last a batch size of " + std::to_string(options.size) + " leaves none of the " +
                std::to_string(samples_.size()) + " samples; take at most as many, or leave drop_last out");
  }
  if (options.grain < 0 || options.grain > options.size) {
    throw Error("batches: the grain is " + std::to_string(options.grain) + " samples; expected 1 to the batch size, " +
                std::to_string(options.size) + ", or 0 for none");
  }
  if (partner.count < 1 || partner.index < 0 || partner.index >= partner.count) {
    throw Error("batches: partner " + std::to_string(partner.index) + " of " + std::to_string(partner.count) +
                "; expected an index from 0 to one less than the count");
  }
  if (options.start < 0 || options.start > count()) {
    throw Error("batches: start is batch " + std::to_string(options.start) + ", and the epoch has " +
                std::to_string(count()) + "; expected 0 to their number");
  }
  set_shares(options.shares);
  for (const char letter : samples_.version()) source_ = mix({source_, static_cast<unsigned char>(letter)});
  if (options.shuffle && samples_.has_order()) {
    order_ = samples_.order(options.seed, options.epoch);
    source_ = mix({source_, hash_of_order(order_)});
  } else if (options.shuffle) {
    // The generator uses only the low 32 bits of a seed, so seed and epoch must both reach them.
    at::Generator generator = at::detail::createCPUGenerator(mix({options.seed, static_cast<uint64_t>(options.epoch)}));
    order_ = at::randperm(samples_.size(), generator, at::TensorOptions(at::kLong));
  }
  if (!samples_.in_memory()) {
    if (samples_.batches_ahead() == 0) return;
    ahead_ = std::make_shared<ReadAhead>(
        [samples = samples_, grain = options_.grain](const auto& numbers) { return samples.read(numbers, grain); });
    return;
  }
  const at::Tensor& x = samples_.tensors().x;
  if (order_.defined()) order_ = order_.to(x.device());
  if (x.is_cpu() && partner_.device.is_cuda()) upload_ = std::make_shared<BatchUpload>(partner_.device, order_);
}

int64_t Batches::count() const {
  const int64_t full = samples_.size() / options_.size;
  return full + (samples_.size() % options_.size != 0 && !options_.drop_last ? 1 : 0);
}

void Batches::set_shares(std::vector<double> shares) {
  if (!shares.empty()) check_shares(shares, partner_.count, "batches");
  options_.shares = std::move(shares);
}

Batch Batches::get(int64_t index) const {
  const Place place = place_of(index);
  Dataset rows = samples_.in_memory() ? gathered(place) : read(place, index);
  if (index + 1 < count()) start(place_of(index + 1));
  Dataset like;
  if (place.part.size() == 0) {
    if (options_.grain > 0) like = samples_.in_memory() ? gathered_now(place.begin, 1) : rows;
    rows = with_each_tensor(std::move(rows), [](const at::Tensor& tensor) { return tensor.narrow(0, 0, 0); });
  }
  return {.x = std::move(rows.x),
          .y = std::move(rows.y),
          .global_size = place.global_size,
          .first = place.part.begin,
          .mark = mark_of(index),
          .grain = options_.grain,
          .runs = options_.grain > 0 ? place.runs : std::vector<int64_t>(),
          .more = std::move(rows.more),
          .like = std::move(like)};
}

// Gathers on the data's device and moves bytes as they are, a quarter of a float's size. Makes floats only then.
Dataset Batches::gathered(const Place& place) const {
  const int64_t begin = place.begin + place.part.begin, size = place.part.size();
  if (numbers_ && place.global_size == numbers_->global_size_) {
    numbers_->note(order_.narrow(0, begin, size));
    if (const Batch& batch = numbers_->stand_in_; batch.x.defined()) return {batch.x, batch.y, batch.more};
  }
  return with_images_as_floats(with_each_tensor(samples_.tensors(), [&](const at::Tensor& data) {
    return upload_ && !data.requires_grad() ? upload_->rows(data, begin, size) : rows_now(data, begin, size);
  }));
}

// Gathers without the copies that are under way.
Dataset Batches::gathered_now(int64_t begin, int64_t size) const {
  return with_images_as_floats(
      with_each_tensor(samples_.tensors(), [&](const at::Tensor& data) { return rows_now(data, begin, size); }));
}

at::Tensor Batches::rows_now(const at::Tensor& data, int64_t begin, int64_t size) const {
  if (!order_.defined()) return data.narrow(0, begin, size).to(partner_.device);
  return data.index_select(0, order_.narrow(0, begin, size)).to(partner_.device);
}

// Reads this partner's samples, at least one: see numbers_of().
Dataset Batches::read(const Place& place, int64_t index) const {
  Dataset samples;
  const InUserCode here("Samples::read (batch " + std::to_string(index) + ")");
  if (ahead_) {
    read_ahead(index);
    samples = ahead_->take(numbers_of(place));
    read_ahead(index + 1);
  } else {
    samples = samples_.read(numbers_of(place), options_.grain);
  }
  return with_each_tensor(std::move(samples), [&](const at::Tensor& tensor) { return tensor.to(partner_.device); });
}

// Reads from batch `index` on. If the shares change, later batches are read anew.
void Batches::read_ahead(int64_t index) const {
  std::vector<std::vector<int64_t>> next;
  const int64_t end = std::min(count(), index + samples_.batches_ahead());
  for (; index < end; ++index) next.push_back(numbers_of(place_of(index)));
  ahead_->want(next);
}

// A partner without samples reads one, since it needs the sizes and types of a sample.
std::vector<int64_t> Batches::numbers_of(const Place& place) const {
  const int64_t wanted = std::max<int64_t>(place.part.size(), 1);
  const int64_t begin = std::min(place.begin + place.part.begin, samples_.size() - wanted);
  std::vector<int64_t> numbers(static_cast<size_t>(wanted));
  std::iota(numbers.begin(), numbers.end(), begin);
  if (order_.defined()) std::copy_n(order_.const_data_ptr<int64_t>() + begin, wanted, numbers.begin());
  return numbers;
}

Batches::Place Batches::place_of(int64_t index) const {
  const int64_t begin = index * options_.size, global_size = std::min(options_.size, samples_.size() - begin);
  const std::vector<int64_t> runs = runs_of(global_size);
  const int64_t unit = std::max<int64_t>(options_.grain, 1);
  const auto partner = static_cast<size_t>(partner_.index);
  return {begin,
          global_size,
          runs,
          {std::min(runs[partner] * unit, global_size), std::min(runs[partner + 1] * unit, global_size)}};
}

// Starts the copy of the batch behind the current one. Later would be too late, since the step may make the host wait.
void Batches::start(const Place& place) const {
  if (!upload_) return;
  each_tensor(samples_.tensors(), [&](const at::Tensor& data) {
    if (!data.requires_grad()) upload_->start(data, place.begin + place.part.begin, place.part.size());
  });
}

// Says where each partner's samples, or grains, begin in a batch. Their number stands at the end.
std::vector<int64_t> Batches::runs_of(int64_t global_size) const {
  const int64_t unit = std::max<int64_t>(options_.grain, 1), units = (global_size + unit - 1) / unit;
  std::vector<int64_t> runs{0};
  const auto sizes = options_.shares.empty() ? std::vector<int64_t>() : sizes_by_shares(units, options_.shares);
  for (int partner = 0; partner < partner_.count; ++partner) {
    runs.push_back(sizes.empty() ? part_of(units, partner, partner_.count).end
                                 : runs.back() + sizes[static_cast<size_t>(partner)]);
  }
  return runs;
}

// The rows' digest tells apart ranks that bring data of their own, since all else is equal there. A single partner may
// take any data.
int32_t Batches::mark_of(int64_t index) const {
  const uint64_t drawn = order_.defined() ? mix({options_.seed, static_cast<uint64_t>(options_.epoch)}) : 0;
  const uint64_t order = source_ == 0 ? drawn : mix({drawn, source_});
  const uint64_t cut = mix({static_cast<uint64_t>(options_.size), static_cast<uint64_t>(options_.grain)});
  const uint64_t mixed = mix({order, static_cast<uint64_t>(samples_.size()), cut, static_cast<uint64_t>(index)});
  const bool compares = samples_.in_memory() && partner_.count > 1;
  const int64_t begin = index * options_.size, rows = std::min(options_.size, samples_.size() - begin);
  const auto digest = [&](const at::Tensor& data) {
    return compares && data.size(0) > 0 ? digest_of_rows(data, order_, begin, rows) : 0;
  };
  const auto& [x, y, more] = samples_.tensors();
  const uint64_t marked = compares ? mix({mixed, digest(x), digest(y)}) : mixed;
  return mark_from(marked, order_.defined());
}

Batches::Iterator Batches::begin() && {
  const auto kept = std::make_shared<const Batches>(std::move(*this));
  return {kept.get(), kept->options_.start, kept};
}

Batches batches(const Dataset& dataset, const BatchOptions& options, const Batches::Partner& partner) {
  return {dataset, options, partner};
}

Batches batches(const Samples& samples, const BatchOptions& options, const Batches::Partner& partner) {
  return {samples, options, partner};
}

}  // namespace lockstep

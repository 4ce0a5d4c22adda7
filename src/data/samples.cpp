#include <ATen/Functions.h>
#include <lockstep/base/error.hpp>
#include <lockstep/data/samples.hpp>

#include "base/number_text.hpp"
#include "base/scramble.hpp"
#include "batch_tensors.hpp"
#include "io/digest.hpp"
#include "sizes_text.hpp"

#include <algorithm>
#include <cmath>
#include <memory>

namespace lockstep {
namespace {

constexpr uint64_t kWeightedDraws = 0x7765696768;  // sets these draws apart from others of the same seed

// Sums the weights up to each sample. Throws Error for weights that allow no draw.
std::vector<double> sums_of_weights(const at::Tensor& weights, int64_t size) {
  const auto refuse = [](const std::string& why) { throw Error("Samples: weights " + why); };
  if (!weights.defined() || weights.dim() != 1 || weights.size(0) != size) {
    refuse("must be one number for each of the " + std::to_string(size) + " samples, and here they are " +
           sizes_text(weights));
  }
  const at::Tensor here = weights.detach().to(at::kCPU, at::kDouble).contiguous();
  const double* const values = here.const_data_ptr<double>();
  std::vector<double> sums;
  double sum = 0;
  for (int64_t i = 0; i < size; ++i) {
    if (!(values[i] >= 0 && std::isfinite(values[i]))) {
      refuse("must be 0 or more, and finite, and that of sample " + std::to_string(i) + " is " +
             number_text(values[i]));
    }
    sums.push_back(sum += values[i]);
  }
  if (!(sum > 0 && std::isfinite(sum))) refuse("add up to " + number_text(sum) + ", so no sample can be drawn");
  return sums;
}

at::Tensor draws(const std::vector<double>& sums, uint64_t seed, int64_t epoch) {
  const uint64_t key = mix({seed, static_cast<uint64_t>(epoch), kWeightedDraws});
  // Rounding must not let the largest draw fall on a sample whose weight is 0.
  const auto last = std::lower_bound(sums.begin(), sums.end(), sums.back());
  at::Tensor order = at::empty({static_cast<int64_t>(sums.size())}, at::TensorOptions(at::kLong));
  auto* const numbers = order.mutable_data_ptr<int64_t>();
  for (size_t i = 0; i < sums.size(); ++i) {
    const double drawn = static_cast<double>(scramble(key + i * kGolden) >> 11) * 0x1p-53 * sums.back();
    numbers[i] = std::min(std::upper_bound(sums.begin(), sums.end(), drawn), last) - sums.begin();
  }
  return order;
}

std::string rows_text(const at::Tensor& tensor) {
  return tensor.defined() ? c10::toString(tensor.scalar_type()) + (" " + sizes_text(tensor)) : "nothing";
}

// Joins the grains' tensors called `name`, one behind the other.
at::Tensor joined_grains(const std::vector<Dataset>& grains, const std::string& name,
                         const std::function<at::Tensor(const Dataset&)>& tensor_of) {
  std::vector<at::Tensor> tensors;
  for (const auto& grain : grains) {
    tensors.push_back(tensor_of(grain));
    const at::Tensor &one = tensors.back(), &first = tensors.front();
    if (one.defined() && one.scalar_type() == first.scalar_type() && one.sizes().slice(1) == first.sizes().slice(1))
      continue;
    throw Error("Samples: with a grain the function is called for one grain after the other, and gave " + name + " " +
                rows_text(first) + " for one and " + rows_text(one) +
                " for another; give the rows of all samples one type and one shape, such as texts of one length");
  }
  // This joins even one grain, so that the layout in memory does not depend on the number of grains.
  return at::cat(tensors);
}

}  // namespace

Dataset Dataset::to(const c10::Device& device) const {
  return with_each_tensor(*this, [&](const at::Tensor& tensor) { return tensor.to(device); });
}

Samples::Samples(int64_t size, Read read, std::string version)
    : size_(size), read_(std::move(read)), version_(std::move(version)) {
  if (size < 0) throw Error("Samples: the number of samples is " + std::to_string(size) + "; expected 0 or more");
  if (!read_) throw Error("Samples: the function that reads samples is empty; give one");
}

int64_t Samples::size() const {
  if (!in_memory()) return size_;
  return tensors_.x.defined() && tensors_.x.dim() > 0 ? tensors_.size() : 0;
}

Samples Samples::read_ahead(int batches) const {
  if (batches < 0) {
    throw Error("Samples: the batches that are read ahead are " + std::to_string(batches) +
                "; expected 1 or more, or 0 for none");
  }
  Samples samples = *this;
  samples.ahead_ = batches;
  return samples;
}

Samples Samples::with_order(Order order, std::string version) const {
  if (!order) throw Error("Samples: the function that gives an epoch's order is empty; give one");
  Samples samples = *this;
  samples.order_ = std::move(order);
  samples.order_version_ = std::move(version);
  return samples;
}

Samples Samples::with_weights(const at::Tensor& weights) const {
  const auto sums = std::make_shared<const std::vector<double>>(sums_of_weights(weights, size()));
  io::Digest digest;
  digest.update(sums->data(), sums->size() * sizeof(double));
  return with_order([sums](uint64_t seed, int64_t epoch) { return draws(*sums, seed, epoch); },
                    "weights " + digest.hex());
}

Dataset Samples::read(const std::vector<int64_t>& numbers, int64_t grain) const {
  const auto count = static_cast<int64_t>(numbers.size());
  if (grain == 0 || count == 0) return read_at_once(numbers);
  std::vector<Dataset> grains;
  for (int64_t begin = 0; begin < count; begin += grain)
    grains.push_back(read_at_once({numbers.begin() + begin, numbers.begin() + std::min(begin + grain, count)}));
  Dataset all{joined_grains(grains, "x", [](const Dataset& one) { return one.x; }),
              joined_grains(grains, "y", [](const Dataset& one) { return one.y; })};
  for (const auto& [name, tensor] : grains[0].more) {
    all.more[name] = joined_grains(grains, "\"" + name + "\"", [&name = name](const Dataset& one) {
      const auto found = one.more.find(name);
      return found == one.more.end() ? at::Tensor() : found->second;
    });
  }
  for (const auto& one : grains) {
    if (one.more.size() == grains[0].more.size()) continue;
    throw Error("Samples: with a grain the function is called for one grain after the other, and gave " +
                std::to_string(grains[0].more.size()) + " tensors beside x and y for one and " +
                std::to_string(one.more.size()) + " for another; give all samples the same tensors");
  }
  return all;
}

Dataset Samples::read_at_once(const std::vector<int64_t>& numbers) const {
  Dataset samples = read_(numbers);
  const auto count = static_cast<int64_t>(numbers.size());
  const auto fits = [&](const at::Tensor& tensor) {
    return tensor.defined() && tensor.dim() > 0 && tensor.size(0) == count;
  };
  const auto refuse = [&](const std::string& gave) {
    throw Error("Samples: asked for " + std::to_string(count) + " samples, the function gave " + gave +
                "; each must have a row for each sample");
  };
  if (!fits(samples.x) || !fits(samples.y)) refuse("x " + sizes_text(samples.x) + " and y " + sizes_text(samples.y));
  for (const auto& [name, tensor] : samples.more) {
    if (!fits(tensor)) refuse("\"" + name + "\" " + sizes_text(tensor));
  }
  return samples;
}

at::Tensor Samples::order(uint64_t seed, int64_t epoch) const {
  const at::Tensor order = order_(seed, epoch);
  const auto refuse = [&](const std::string& gave) {
    throw Error("Samples: the function that gives the order of epoch " + std::to_string(epoch) + " gave " + gave +
                "; it must give the numbers of " + std::to_string(size()) +
                " samples, int64 on the CPU, each from 0 to " + std::to_string(size() - 1));
  };
  if (!order.defined() || order.dim() != 1 || order.size(0) != size()) refuse("a tensor " + sizes_text(order));
  if (order.scalar_type() != at::kLong || !order.is_cpu())
    refuse(std::string("numbers of type ") + c10::toString(order.scalar_type()) + " on " + order.device().str());
  if (size() == 0) return order;
  const int64_t least = order.min().item<int64_t>(), most = order.max().item<int64_t>();
  if (least < 0 || most >= size()) refuse("numbers from " + std::to_string(least) + " to " + std::to_string(most));
  return order.contiguous();
}

Samples Samples::to(const c10::Device& device) const {
  if (!in_memory() || !tensors_.x.defined() || !tensors_.y.defined()) return *this;
  Samples samples = *this;
  samples.tensors_ = tensors_.to(device);
  return samples;
}

}  // namespace lockstep

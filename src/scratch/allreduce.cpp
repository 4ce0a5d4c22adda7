#include <ATen/MemoryOverlap.h>
#include <ATen/ops/_unique.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/isin.h>
#include <c10/core/GradMode.h>
#include <lockstep/base/error.hpp>
#include <lockstep/devices/devices.hpp>
#include <lockstep/scratch/allreduce.hpp>
#include <lockstep/scratch/on_each_device.hpp>

#include <algorithm>
#include <array>
#include <functional>
#include <string>
#include <tuple>

#include "base/classic.hpp"
#include "data/parts.hpp"

namespace lockstep {

std::string_view to_string(AllreduceAlgorithm algorithm) {
  constexpr std::array names = {"automatic", "naive", "sharded", "ring", "tree"};
  const auto number = static_cast<size_t>(algorithm);
  if (number < names.size()) return names[number];
  throw Error("to_string: there is no allreduce algorithm number " + std::to_string(static_cast<int>(algorithm)));
}

namespace {

// ---- Checks of the arguments ---------------------------------------------------------------------------------------

std::string describe(const std::vector<at::Tensor>& tensors, size_t i) {
  return classic_text("tensor ", i, " is ", tensors[i].sizes(), " ", c10::toString(tensors[i].scalar_type()), " on ",
                      tensors[i].device());
}

bool can_be_added(at::ScalarType type) {
  constexpr std::array types = {at::kByte,     at::kChar,  at::kShort,  at::kInt,          at::kLong,         at::kHalf,
                                at::kBFloat16, at::kFloat, at::kDouble, at::kComplexFloat, at::kComplexDouble};
  return std::find(types.begin(), types.end(), type) != types.end();
}

// Tells where in its storage each element of a tensor lies.
at::Tensor places(const at::Tensor& tensor) {
  const auto elements = static_cast<int64_t>(tensor.storage().nbytes() / tensor.itemsize());
  return at::arange(elements).as_strided(tensor.sizes(), tensor.strides(), tensor.storage_offset()).flatten();
}

// LibTorch knows the answer for tensors without gaps, and says TooHard for others. Two columns of a matrix share
// nothing, but two windows over one row may share something.
bool share_memory(const at::Tensor& a, const at::Tensor& b) {
  const auto status = at::get_overlap_status(a, b);
  if (status != at::MemOverlapStatus::TooHard) return status != at::MemOverlapStatus::No;
  return a.is_alias_of(b) && at::isin(places(a), places(b)).any().item<bool>();
}

bool elements_share_memory(const at::Tensor& tensor) {
  const auto overlap = at::has_internal_overlap(tensor);
  if (overlap != at::MemOverlap::TooHard) return overlap == at::MemOverlap::Yes;
  return std::get<0>(at::_unique(places(tensor))).numel() < tensor.numel();
}

void check(const std::vector<at::Tensor>& tensors) {
  if (tensors.empty()) throw Error("allreduce: the list of tensors is empty; it needs one tensor per device");
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (!tensors[i].defined()) throw Error("allreduce: tensor " + std::to_string(i) + " is undefined");
  }
  const at::Tensor& first = tensors[0];
  for (size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& tensor = tensors[i];
    if (tensor.sizes() != first.sizes() || tensor.scalar_type() != first.scalar_type() ||
        tensor.device().type() != first.device().type()) {
      throw Error("allreduce: tensors must agree in shape, type and kind of device: " + describe(tensors, 0) + ", " +
                  describe(tensors, i));
    }
    if (tensor.layout() != at::kStrided || !can_be_added(tensor.scalar_type())) {
      throw Error("allreduce: tensors must be dense and numeric, but " + describe(tensors, i));
    }
    if (elements_share_memory(tensor)) {
      throw Error("allreduce: " + describe(tensors, i) + ", and its elements share memory; clone() it first");
    }
    for (size_t j = 0; j < i; ++j) {
      if (!share_memory(tensors[j], tensor)) continue;
      throw Error("allreduce: every device needs a tensor of its own, but these two share memory: " +
                  describe(tensors, j) + ", " + describe(tensors, i));
    }
  }
}

// ---- The algorithms, over flat tensors -----------------------------------------------------------------------------

using Tensors = std::vector<at::Tensor>;

// Uses on_each_device where it pays: starting a CPU thread takes longer than adding a few thousand numbers, or than
// queueing an addition for a GPU. The order of addition is the same either way.
void for_each_device(const Tensors& tensors, const std::function<void(size_t)>& work) {
  constexpr int64_t worth_a_thread = 1 << 15;
  if (!tensors[0].is_cpu() || tensors[0].numel() < worth_a_thread) {
    for (size_t i = 0; i < tensors.size(); ++i) work(i);
  } else {
    Devices devices;
    for (const auto& tensor : tensors) devices.push_back(tensor.device());
    on_each_device(devices, work);
  }
}

// Gives slice `index` of `count` slices.
at::Tensor slice(const at::Tensor& flat, size_t index, size_t count) {
  const Range part = part_of(flat.numel(), static_cast<int>(index), static_cast<int>(count));
  return flat.narrow(0, part.begin, part.size());
}

void accumulate(at::Tensor sum, const at::Tensor& from) {
  sum.add_(from.to(sum.device()));
}

// Computes the section's allreduce: device 0 adds everything and sends the sum to everybody.
void naive(const Tensors& data) {
  for (size_t i = 1; i < data.size(); ++i) accumulate(data[0], data[i]);
  for (size_t i = 1; i < data.size(); ++i) data[i].copy_(data[0]);
}

// Makes every device add and send one slice, as device 0 does all in `naive`. So devices share the work and traffic.
void sharded(const Tensors& data) {
  const size_t count = data.size();
  for_each_device(data, [&](size_t i) {
    const at::Tensor sum = slice(data[0], i, count).to(data[i].device(), data[i].scalar_type(), false, /*copy=*/true);
    for (size_t j = 1; j < count; ++j) accumulate(sum, slice(data[j], i, count));
    for (size_t j = 0; j < count; ++j) slice(data[j], i, count).copy_(sum);
  });
}

// Sends slices round a ring, to grow at every stop. Device i holds the sum of slice i + 1 after count - 1 steps. Then
// the sums travel round once more. In a step every device takes a slice from its left neighbour that nobody changes.
void ring(const Tensors& data) {
  const size_t count = data.size();
  const auto left = [&](size_t i) { return (i + count - 1) % count; };
  for (size_t step = 0; step + 1 < count; ++step) {
    for_each_device(data, [&](size_t i) {
      const size_t travelling = (left(i) + count - step) % count;
      accumulate(slice(data[i], travelling, count), slice(data[left(i)], travelling, count));
    });
  }
  for (size_t step = 0; step + 1 < count; ++step) {
    for_each_device(data, [&](size_t i) {
      const size_t travelling = (i + count - step) % count;
      slice(data[i], travelling, count).copy_(slice(data[left(i)], travelling, count));
    });
  }
}

// Makes pairs, then pairs of pairs: half of the devices send their sum to the other half and rest, until device 0 holds
// the whole sum. Then it goes back the same way.
void tree(const Tensors& data) {
  const size_t count = data.size();
  size_t distance = 1;
  for (; distance < count; distance *= 2) {
    for_each_device(data, [&](size_t i) {
      if (i % (2 * distance) == 0 && i + distance < count) accumulate(data[i], data[i + distance]);
    });
  }
  for (distance /= 2; distance > 0; distance /= 2) {
    for_each_device(data, [&](size_t i) {
      if (i % (2 * distance) == distance) data[i].copy_(data[i - distance]);
    });
  }
}

void run_algorithm(AllreduceAlgorithm algorithm, const Tensors& data) {
  switch (algorithm) {
    case AllreduceAlgorithm::automatic:
      return data[0].is_cpu() ? naive(data) : sharded(data);
    case AllreduceAlgorithm::naive:
      return naive(data);
    case AllreduceAlgorithm::sharded:
      return sharded(data);
    case AllreduceAlgorithm::ring:
      return ring(data);
    case AllreduceAlgorithm::tree:
      return tree(data);
  }
}

}  // namespace

void allreduce(std::vector<at::Tensor>& tensors, AllreduceAlgorithm algorithm) {
  to_string(algorithm);  // throws for a number that is no algorithm
  check(tensors);
  if (tensors[0].numel() == 0 || tensors.size() == 1) return;

  const at::NoGradGuard no_grad;
  Tensors flat;  // the tensors themselves as one row each, or copies of tensors that have gaps
  for (const auto& tensor : tensors) flat.push_back(tensor.detach().contiguous().view(-1));
  run_algorithm(algorithm, flat);
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (!tensors[i].is_contiguous()) tensors[i].copy_(flat[i].view_as(tensors[i]));
  }
}

}  // namespace lockstep

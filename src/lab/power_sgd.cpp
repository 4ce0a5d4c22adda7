#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/linalg_qr.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <lockstep/base/error.hpp>
#include <lockstep/lab/power_sgd.hpp>

#include "base/classic.hpp"
#include "base/number_text.hpp"
#include "data_parallel/flat_view.hpp"

#include <algorithm>
#include <memory>
#include <mutex>
#include <tuple>

namespace lockstep {
namespace {

// Gives the rows of M, for a tensor with two dimensions or more.
int64_t rows_of(const at::Tensor& gradient) {
  return gradient.size(0);
}

int64_t columns_of(const at::Tensor& gradient) {
  return gradient.size(0) == 0 ? 0 : gradient.numel() / gradient.size(0);
}

// LAPACK has no 16 bits.
at::ScalarType computed_type(at::ScalarType type) {
  return type == at::kDouble ? at::kDouble : at::kFloat;
}

// Gives Q of the QR decomposition. LibTorch loads CUDA's linear algebra in the first such call, and fails if two
// threads are the first.
at::Tensor orthonormal(const at::Tensor& matrix) {
  static std::once_flag loaded;
  if (matrix.is_cuda()) std::call_once(loaded, [&] { at::linalg_qr(at::zeros({1, 1}, matrix.options())); });
  return std::get<0>(at::linalg_qr(matrix));
}

// Gives FNV-1a over the text's bytes, the same on every machine.
uint64_t number_of(const std::string& text) {
  uint64_t number = 14695981039346656037u;
  for (const char c : text) number = (number ^ static_cast<unsigned char>(c)) * 1099511628211u;
  return number;
}

// Gives the sides of Q for a gradient of so many rows and columns.
std::vector<int64_t> query_sizes(int64_t rank, int64_t rows, int64_t columns) {
  return {columns, std::min({rank, rows, columns})};
}

std::string shape_text(at::IntArrayRef sizes, at::ScalarType type) {
  return classic_text(sizes, ' ', type);
}

std::string shape_text(const at::Tensor& tensor) {
  return shape_text(tensor.sizes(), tensor.scalar_type());
}

// Holds a bucket while it is averaged.
struct LowRank {
  std::vector<at::Tensor> whole;     // gradients that are not compressed
  std::vector<at::Tensor> low_rank;  // gradients that are compressed, and for each of them:
  std::vector<at::Tensor> left;      // M, then its remainder: the hook's own error
  std::vector<at::Tensor> queries;   // Q, the hook's own
  std::vector<at::Tensor> bases;     // P, orthogonal
};

}  // namespace

PowerSgdHook::PowerSgdHook(const PowerSgdOptions& options) : options_(options) {
  if (options_.rank < 1) {
    throw Error("PowerSgdHook: the rank is " + std::to_string(options_.rank) + "; it must be at least 1");
  }
  if (!(options_.min_compression >= 0)) {
    throw Error("PowerSgdHook: min_compression is " + number_text(options_.min_compression) +
                "; it must be a number of at least 0");
  }
}

bool PowerSgdHook::compresses(const at::Tensor& gradient) const {
  if (gradient.dim() < 2 || gradient.numel() == 0) return false;
  const int64_t rows = rows_of(gradient), columns = columns_of(gradient);
  const auto sent = static_cast<double>(std::min({options_.rank, rows, columns}) * (rows + columns));
  return sent * options_.min_compression < static_cast<double>(gradient.numel());
}

PowerSgdHook::Memory& PowerSgdHook::memory_of(const std::string& name, const at::Tensor& gradient, const Rank& rank) {
  Memory& memory = memory_[name];
  const int64_t rows = rows_of(gradient), columns = columns_of(gradient);
  const auto type = gradient.options().dtype(computed_type(gradient.scalar_type()));
  if (!memory.error.defined()) {
    memory.error = at::zeros({rows, columns}, type);
    auto generator = at::make_generator<at::CPUGeneratorImpl>(options_.seed + number_of(name));
    memory.query = at::randn(query_sizes(options_.rank, rows, columns), generator, at::kDouble).to(type);
  } else if (memory.error.sizes() != at::IntArrayRef({rows, columns}) || memory.error.dtype() != type.dtype()) {
    throw Error(rank.name() + ": PowerSgdHook: of " + name + " an error was loaded that is " +
                shape_text(memory.error) + ", and its gradient is, as a matrix, " +
                shape_text({rows, columns}, computed_type(gradient.scalar_type())) +
                "; load what a run of the same network remembered, or nothing");
  }
  return memory;
}

CommunicationHook::Round PowerSgdHook::average(const GradientBucket& bucket, Rank& rank) {
  if (bucket.flat.is_complex()) {
    throw Error(rank.name() + ": PowerSgdHook: " + bucket.names[0] + " is complex; use no hook, or real parameters");
  }
  const auto here = std::make_shared<LowRank>();
  const auto type = computed_type(bucket.flat.scalar_type());
  std::vector<at::Tensor> sent;
  for (size_t i = 0; i < bucket.gradients.size(); ++i) {
    const at::Tensor& gradient = bucket.gradients[i];
    if (!compresses(gradient)) {
      here->whole.push_back(gradient);
      sent.push_back(gradient.to(type));
      continue;
    }
    Memory& memory = memory_of(bucket.names[i], gradient, rank);
    here->low_rank.push_back(gradient);
    here->left.push_back(memory.error.add_(gradient.reshape(memory.error.sizes())));
    here->queries.push_back(memory.query);
  }
  const size_t whole = sent.size();
  for (size_t i = 0; i < here->left.size(); ++i) sent.push_back(at::mm(here->left[i], here->queries[i]));
  const at::Tensor first = flat_copy(sent);

  const auto take_whole = [here, sent, first, whole] {
    const std::vector<at::Tensor> means = parts_like(sent, first);
    for (size_t i = 0; i < whole; ++i) here->whole[i].copy_(means[i]);
    return std::vector<at::Tensor>(means.begin() + static_cast<ptrdiff_t>(whole), means.end());
  };
  const auto second_round = [here, take_whole, rank]() mutable -> CommunicationHook::Round {
    std::vector<at::Tensor> products;  // the new Q
    for (const at::Tensor& mean : take_whole()) {
      const size_t i = products.size();
      here->bases.push_back(orthonormal(mean));
      products.push_back(at::mm(here->left[i].t(), here->bases[i]));
      here->left[i].addmm_(here->bases[i], products[i].t(), /*beta=*/1, /*alpha=*/-1);
    }
    const at::Tensor second = flat_copy(products);
    return {.work = CommunicationHook::post_allreduce(rank, second, c10d::ReduceOp::AVG),
            .finish = [here, products, second] {
              const std::vector<at::Tensor> means = parts_like(products, second);
              for (size_t i = 0; i < means.size(); ++i) {
                here->queries[i].copy_(means[i]);
                here->low_rank[i].copy_(at::mm(here->bases[i], means[i].t()).view(here->low_rank[i].sizes()));
              }
            }};
  };
  auto work = CommunicationHook::post_allreduce(rank, first, c10d::ReduceOp::AVG);
  if (here->low_rank.empty()) return {.work = std::move(work), .finish = take_whole};
  return {.work = std::move(work), .next = second_round};
}

PowerSgdHook::NamedTensors PowerSgdHook::errors() const {
  NamedTensors errors;
  for (const auto& [name, memory] : memory_) errors.emplace_back(name, memory.error);
  return errors;
}

PowerSgdHook::NamedTensors PowerSgdHook::queries() const {
  NamedTensors queries;
  for (const auto& [name, memory] : memory_) queries.emplace_back(name, memory.query);
  return queries;
}

void PowerSgdHook::check_loaded(const std::string& name, const Memory& memory) const {
  const auto& [error, query] = memory;
  if (!error.defined() || !query.defined()) {
    throw Error("PowerSgdHook: of " + name + " there is " +
                (error.defined() ? "an error, but no query" : "a query, but no error"));
  }
  if (error.dim() != 2) {
    throw Error("PowerSgdHook: the error of " + name + " is " + shape_text(error) + ", which is no matrix");
  }
  const auto expected = query_sizes(options_.rank, error.size(0), error.size(1));
  if (query.sizes() == expected && query.scalar_type() == error.scalar_type()) return;
  throw Error("PowerSgdHook: the query of " + name + " is " + shape_text(query) + ", and to an error that is " +
              shape_text(error) + " and rank " + std::to_string(options_.rank) + " belongs one that is " +
              shape_text(expected, error.scalar_type()) + "; load what a hook of the same rank remembered");
}

void PowerSgdHook::load(const NamedTensors& errors, const NamedTensors& queries, const c10::Device& device) {
  std::map<std::string, Memory> loaded;
  for (const auto& [name, error] : errors) loaded[name].error = error.to(device, error.scalar_type(), false, true);
  for (const auto& [name, query] : queries) loaded[name].query = query.to(device, query.scalar_type(), false, true);
  for (const auto& [name, memory] : loaded) check_loaded(name, memory);
  memory_ = std::move(loaded);
}

}  // namespace lockstep

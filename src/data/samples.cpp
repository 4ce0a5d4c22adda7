#include <lockstep/base/error.hpp>
#include <lockstep/data/samples.hpp>

#include <sstream>

namespace lockstep {
namespace {

std::string rows_text(const at::Tensor& tensor) {
  if (!tensor.defined()) return "undefined";
  std::ostringstream text;
  text << "of sizes " << tensor.sizes();
  return text.str();
}

}  // namespace

Samples::Samples(int64_t size, Read read, std::string version)
    : size_(size), read_(std::move(read)), version_(std::move(version)) {
  if (size < 0) throw Error("Samples: the number of samples is " + std::to_string(size) + "; expected 0 or more");
  if (!read_) throw Error("Samples: the function that reads samples is empty; give one");
}

int64_t Samples::size() const {
  if (!in_memory()) return size_;
  return tensors_.x.defined() && tensors_.x.dim() > 0 ? tensors_.size() : 0;
}

Dataset Samples::read(const std::vector<int64_t>& numbers) const {
  Dataset samples = read_(numbers);
  const auto count = static_cast<int64_t>(numbers.size());
  for (const auto* const tensor : {&samples.x, &samples.y}) {
    if (tensor->defined() && tensor->dim() > 0 && tensor->size(0) == count) continue;
    throw Error("Samples: asked for " + std::to_string(count) + " samples, the function gave x " +
                rows_text(samples.x) + " and y " + rows_text(samples.y) + "; both must have a row for each sample");
  }
  return samples;
}

Samples Samples::to(const c10::Device& device) const {
  if (!in_memory() || !tensors_.x.defined() || !tensors_.y.defined()) return *this;
  return tensors_.to(device);
}

}  // namespace lockstep

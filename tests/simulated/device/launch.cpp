#include "launch.hpp"

#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>

#include "memory.hpp"
#include "reports.hpp"

namespace simulated {

View::View(const at::Tensor& tensor)
    : data_(static_cast<char*>(const_cast<void*>(tensor.unsafeGetTensorImpl()->data()))),
      sizes_(tensor.sizes().vec()),
      strides_(tensor.strides().vec()),
      type_(tensor.scalar_type()) {}

at::Tensor View::on_stream() const {
  const auto options = at::TensorOptions(at::kCPU).dtype(type_);
  if (data_ == nullptr) return at::empty_strided(sizes_, strides_, options);
  return at::from_blob(simulated::on_stream(data_), sizes_, strides_, options);
}

const char* View::end() const {
  int64_t last = 0;
  for (size_t i = 0; i < sizes_.size(); ++i) {
    if (sizes_[i] == 0) return data_;
    last += (sizes_[i] - 1) * strides_[i];
  }
  return data_ + (last + 1) * static_cast<int64_t>(c10::elementSize(type_));
}

void launch(Stream& stream, const std::string& what, const std::vector<Use>& uses, std::function<void()> task) {
  ++counts().launches;
  const std::lock_guard lock(order());
  join(stream.clock, host_clock());
  ++stream.clock[stream.number];
  for (const auto& use : uses) allocator().note(stream, use.view.begin(), use.view.end(), use.writes, what);
  stream.queue(std::move(task));
}

}  // namespace simulated

#include "launch.hpp"

#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>

#include "graph.hpp"
#include "memory.hpp"
#include "reports.hpp"

namespace simulated {

View::View(const at::Tensor& tensor)
    : data_(static_cast<char*>(const_cast<void*>(tensor.unsafeGetTensorImpl()->data()))),
      sizes_(tensor.sizes().vec()),
      strides_(tensor.strides().vec()),
      type_(tensor.scalar_type()) {}

View::View(char* begin, size_t bytes)
    : data_(begin), sizes_{static_cast<int64_t>(bytes)}, strides_{1}, type_(at::kByte) {}

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

void launch(Stream& stream, const Launch& launch) {
  const std::lock_guard lock(order());
  if (stream.recorder != nullptr) return stream.recorder->add(stream, launch);
  ++counts().launches;
  if (Device::has_high_priority(stream)) ++counts().high_priority_launches;
  give(stream, launch);
}

void launch(Stream& stream, const std::string& what, const std::vector<Use>& uses, Task task) {
  launch(stream,
         {what, uses, [task = std::make_shared<Task>(std::move(task))]() -> Task { return [task] { (*task)(); }; }});
}

void give(Stream& stream, const Launch& launch) {
  join(stream.clock, host_clock());
  ++stream.clock[stream.number];
  for (const auto& [view, writes] : launch.uses) {
    allocator().note(stream, view.begin(), view.end(), writes, launch.what);
  }
  stream.queue(launch.make());
}

bool is_recorded(const Stream& stream) {
  const std::lock_guard lock(order());
  return stream.recorder != nullptr;
}

}  // namespace simulated

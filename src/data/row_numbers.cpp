#include "row_numbers.hpp"

#include "batch_tensors.hpp"
#include "images_as_floats.hpp"

namespace lockstep {

void RowNumbers::give(Batches& batches, const std::shared_ptr<RowNumbers>& numbers) {
  if (!batches.samples_.in_memory() || !batches.order_.defined()) return;
  const Dataset& data = batches.samples_.tensors();
  if (!data.x.is_cuda() || data.x.device() != batches.partner_.device) return;
  numbers->data_ = data;
  batches.numbers_ = numbers;
}

void RowNumbers::note(const at::Tensor& numbers) {
  if (numbers_.defined()) {
    numbers_.copy_(numbers);
  } else {
    numbers_ = numbers.clone();
  }
}

Batch RowNumbers::gather(const Batch& like) const {
  Batch batch = like;
  Dataset rows = with_images_as_floats(
      with_each_tensor(data_, [&](const at::Tensor& tensor) { return tensor.index_select(0, numbers_); }));
  batch.x = std::move(rows.x);
  batch.y = std::move(rows.y);
  batch.more = std::move(rows.more);
  return batch;
}

}  // namespace lockstep

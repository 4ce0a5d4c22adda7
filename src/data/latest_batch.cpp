#include "latest_batch.hpp"

#include <c10/core/TensorImpl.h>
#include <c10/util/intrusive_ptr.h>

namespace lockstep {
namespace {

struct Note {
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> samples;
  BatchSizes sizes;
};

std::optional<Note>& latest() {
  thread_local std::optional<Note> note;
  return note;
}

}  // namespace

void note_batch(const Batch& batch) {
  latest() = Note{c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>(batch.x.getIntrusivePtr()),
                  {.local = batch.size(), .global = batch.global_size, .grain = batch.grain}};
}

std::optional<BatchSizes> latest_batch() {
  if (!latest() || latest()->samples.expired()) return std::nullopt;
  return latest()->sizes;
}

}  // namespace lockstep

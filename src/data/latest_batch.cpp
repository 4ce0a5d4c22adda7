#include "latest_batch.hpp"

#include <c10/core/TensorImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <utility>

namespace lockstep {
namespace {

struct Note {
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> samples;
  BatchSizes sizes;
  std::vector<uint32_t> versions;
};

thread_local std::optional<Note> noted;

}  // namespace

void note_batch(const Batch& batch, int partners, std::vector<uint32_t> versions) {
  noted = Note{c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>(batch.x.getIntrusivePtr()),
               {batch.size(), batch.global_size, batch.grain, partners, batch.mark},
               std::move(versions)};
}

std::optional<BatchSizes> latest_batch() {
  if (!noted || noted->samples.expired()) return std::nullopt;
  return noted->sizes;
}

std::vector<uint32_t> versions_of_batch(const Batch& batch) {
  if (!noted || !batch.x.defined() || noted->samples.lock().get() != batch.x.unsafeGetTensorImpl()) return {};
  return noted->versions;
}

}  // namespace lockstep

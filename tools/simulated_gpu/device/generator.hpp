// Generator: a seed and how often it was drawn from, as Philox on a GPU. Random numbers are the same whatever the
// streams' threads do.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>

#include "device.hpp"

namespace simulated {

class Generator final : public at::CPUGeneratorImpl {
 public:
  explicit Generator(int device);

  // A CPU generator for one task.
  at::Generator for_one_task();

  void set_current_seed(uint64_t seed) override;
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override;  // 16 bytes, as CUDA's
  void set_state(const c10::TensorImpl& state) override;

 private:
  Generator* clone_impl() const override;

  uint64_t drawn_ = 0;
};

const at::Generator& default_generator(int device);

}  // namespace simulated

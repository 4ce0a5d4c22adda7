#include "generator.hpp"

#include <ATen/ops/empty.h>

#include <cstring>

#include "guard.hpp"
#include "settings.hpp"

namespace simulated {

Generator::Generator(int device) {
  device_ = device_at(device);
  key_set_ = c10::DispatchKeySet(c10::DispatchKey::SIMULATED_TYPE);
}

at::Generator Generator::for_one_task() {
  const std::lock_guard lock(mutex_);
  return at::make_generator<at::CPUGeneratorImpl>(current_seed() * 0x9e3779b97f4a7c15U + drawn_++);
}

void Generator::set_current_seed(uint64_t seed) {
  at::CPUGeneratorImpl::set_current_seed(seed);
  drawn_ = 0;
}

c10::intrusive_ptr<c10::TensorImpl> Generator::get_state() const {
  at::Tensor state = at::empty({2 * sizeof(uint64_t)}, at::TensorOptions(at::kCPU).dtype(at::kByte));
  const uint64_t seed = current_seed();
  std::memcpy(state.mutable_data_ptr(), &seed, sizeof(seed));
  std::memcpy(state.mutable_data_ptr<uint8_t>() + sizeof(seed), &drawn_, sizeof(drawn_));
  return state.getIntrusivePtr();
}

void Generator::set_state(const c10::TensorImpl& state) {
  TORCH_CHECK(state.numel() == 2 * sizeof(uint64_t), "this is no state of a simulated device's generator");
  uint64_t seed = 0;
  const auto* const bytes = static_cast<const char*>(state.data());
  std::memcpy(&seed, bytes, sizeof(seed));
  set_current_seed(seed);
  std::memcpy(&drawn_, bytes + sizeof(seed), sizeof(drawn_));
}

Generator* Generator::clone_impl() const {
  auto* const copy = new Generator(device_.index());
  copy->set_current_seed(current_seed());
  copy->drawn_ = drawn_;
  return copy;
}

const at::Generator& default_generator(int device) {
  static auto* const generators = [] {
    auto* const all = new std::vector<at::Generator>;
    for (int index = 0; index < settings().devices; ++index) all->push_back(at::make_generator<Generator>(index));
    return all;
  }();
  return generators->at(static_cast<size_t>(device));
}

}  // namespace simulated

#include "generator.hpp"

#include "guard.hpp"
#include "settings.hpp"

namespace simulated {

Generator::Generator(int device) {
  device_ = device_at(device);
  key_set_ = c10::DispatchKeySet(c10::DispatchKey::CUDA);
}

at::Generator Generator::for_one_task() {
  const std::lock_guard lock(mutex_);
  return at::make_generator<at::CPUGeneratorImpl>(current_seed() * 0x9e3779b97f4a7c15U + drawn_++);
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

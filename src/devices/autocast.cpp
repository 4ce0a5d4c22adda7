#include <ATen/autocast_mode.h>
#include <lockstep/devices/autocast.hpp>

namespace lockstep {

Autocast::Autocast(const c10::Device& device, c10::ScalarType type, bool enabled)
    : device_type_(device.type()),
      enabled_before_(at::autocast::is_autocast_enabled(device_type_)),
      type_before_(at::autocast::get_autocast_dtype(device_type_)) {
  at::autocast::set_autocast_enabled(device_type_, enabled);
  at::autocast::set_autocast_dtype(device_type_, type);
  at::autocast::increment_nesting();
}

Autocast::~Autocast() {
  // The cached casts belong to weights that are about to change. (All threads share the cache, which finds casts by
  // their weight. Another rank whose casts are lost here makes new ones.)
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  at::autocast::set_autocast_dtype(device_type_, type_before_);
  at::autocast::set_autocast_enabled(device_type_, enabled_before_);
}

}  // namespace lockstep

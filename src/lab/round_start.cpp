#include "round_start.hpp"

#include <c10/core/GradMode.h>

#include "data_parallel/flat_view.hpp"
#include "data_parallel/tensor_hash.hpp"

#include <utility>

namespace lockstep {

RoundStart::RoundStart(const std::vector<std::vector<at::Tensor>>& groups) : groups_(groups) {
  for (const auto& group : groups_) {
    values_.push_back(flat_copy(group));
    for (const auto& parameter : group)
      hooks_.push_back(std::make_unique<GradientHook>(parameter, [this] { on_gradient(); }));
  }
  end_round();
}

void RoundStart::end_round() {
  noted_.clear();
  for (const auto& group : groups_) {
    for (const auto& parameter : group) noted_.emplace_back(parameter.const_data_ptr(), parameter._version());
  }
  has_begun_ = is_new_ = false;
}

// Comparing values would make the host wait for a GPU in each round.
bool RoundStart::is_touched() const {
  size_t i = 0;
  for (const auto& group : groups_) {
    for (const auto& parameter : group) {
      const auto& [memory, version] = noted_[i++];
      if (parameter.const_data_ptr() != memory || parameter._version() != version) return true;
    }
  }
  return false;
}

// Touched parameters may have the same values all the same, as after an evaluation with others on one rank alone.
void RoundStart::on_gradient() {
  if (!std::exchange(has_begun_, true) && is_touched()) take_present_values();
}

void RoundStart::take_present_values() {
  const c10::AutoGradMode no_grad(false);
  for (size_t i = 0; i < groups_.size(); ++i) {
    const at::Tensor now = flat_copy(groups_[i]);
    if (same_values(now, values_[i])) continue;
    values_[i] = now;
    is_new_ = true;
  }
}

std::vector<int64_t> RoundStart::hashes() const {
  std::vector<int64_t> hashes;
  for (const auto& values : values_) hashes.push_back(tensor_hash(values));
  return hashes;
}

std::vector<int64_t> RoundStart::marks() const {
  const c10::AutoGradMode no_grad(false);
  const Begun begun = !has_begun_ && is_touched() ? kNotKnown : is_new_ ? kWithOthers : kAsLeft;
  std::vector<int64_t> marks{begun};
  for (size_t i = 0; i < groups_.size(); ++i) {
    marks.push_back(begun == kAsLeft ? 0 : tensor_hash(begun == kNotKnown ? flat_copy(groups_[i]) : values_[i]));
  }
  return marks;
}

}  // namespace lockstep

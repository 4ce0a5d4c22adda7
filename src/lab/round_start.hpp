// RoundStart: the values that a LocalSgd's parameters had when a round began, from which an outer optimizer moves them.
//
// A round begins with the first gradient that autograd adds up after the round before. If the parameters are not what
// that one left, as when the user has loaded weights meanwhile, their values of that moment count. Used by its rank's
// thread, and by autograd's while that one waits. Cost: it holds the parameters once more.
#pragma once

#include <ATen/core/Tensor.h>

#include "data_parallel/gradient_hook.hpp"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace lockstep {

class RoundStart {
 public:
  // Each group's parameters have one type. They need gradients.
  explicit RoundStart(const std::vector<std::vector<at::Tensor>>& groups);
  RoundStart(const RoundStart&) = delete;  // hooks point to it
  RoundStart& operator=(const RoundStart&) = delete;

  at::Tensor& values(size_t group) { return values_[group]; }  // flat, see flat_copy()

  // The values are in the parameters now. The next gradient begins a round.
  void end_round();

  // Says whether this round began with the values that the one before left, or with others. A rank without samples in
  // the round cannot know whether its values were loaded or moved since.
  enum Begun : int64_t { kAsLeft, kWithOthers, kNotKnown };
  // Begun, then hashes of the values; zeros if they are as left. The values are looked at only if they are not what the
  // round before left; then a GPU is waited for.
  std::vector<int64_t> marks() const;
  void take_present_values();           // they were loaded
  std::vector<int64_t> hashes() const;  // hashes of the values

 private:
  void on_gradient();
  bool is_touched() const;

  std::vector<std::vector<at::Tensor>> groups_;
  std::vector<at::Tensor> values_;
  std::vector<std::pair<const void*, uint32_t>> noted_;  // where each parameter lay, and its version
  bool has_begun_ = false;
  bool is_new_ = false;  // the round began with other values than the one before left
  std::vector<std::unique_ptr<GradientHook>> hooks_;
};

}  // namespace lockstep

// UnaveragedGradients: notices parameters that a gradient of one rank alone has changed, so that they differ between
// the ranks. GradientBuckets uses it. Used by one thread at a time.
#pragma once

#include <ATen/core/Tensor.h>
#include <lockstep/ranks/rank.hpp>

#include <string>
#include <utility>

namespace lockstep {

class UnaveragedGradients {
 public:
  // Errors begin with `name`. It says which rank this is, and what the user calls the object.
  UnaveragedGradients(const Rank& rank, std::string name) : rank_(rank), name_(std::move(name)) {}

  // A backward that nobody averages has added to this parameter's gradient. This alone is no mistake: a loss of another
  // net may flow through this one, and zero_grad() follows. Throws Error as check() does: nobody calls that where a
  // loop calls neither net(x) nor a backward that is averaged.
  void note(const std::string& parameter_name, const at::Tensor& parameter);

  void forget();  // forgets the notes; call it as an averaged backward begins

  // Throws Error if the first parameter that was noted has changed since.
  void check() const;

 private:
  const Rank rank_;
  const std::string name_;
  const c10::TensorImpl* noted_parameter_ = nullptr;
  std::string parameter_name_;
  at::Tensor parameter_, value_;  // undefined: none was noted
  int noted_ = 0, compared_ = 0;  // how often a GPU's parameter was noted and compared
};

}  // namespace lockstep

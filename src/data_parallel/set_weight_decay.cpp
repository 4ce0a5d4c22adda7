#include <lockstep/base/error.hpp>
#include <lockstep/data_parallel/optimizer.hpp>
#include <lockstep/optim/layer_wise.hpp>

#include "base/number_text.hpp"

namespace lockstep {
namespace {

// Sets it if the options are of one of these types; gives whether they are.
template <class... Types>
bool set_weight_decay_of(torch::optim::OptimizerOptions& options, double weight_decay) {
  const auto set = [&](auto* own) {
    if (own == nullptr) return false;
    if constexpr (requires { own->set_weight_decay(weight_decay); }) {
      own->set_weight_decay(weight_decay);
    } else {
      own->weight_decay(weight_decay);
    }
    return true;
  };
  return (set(dynamic_cast<Types*>(&options)) || ...);
}

}  // namespace

void Optimizer::set_weight_decay(torch::optim::OptimizerParamGroup& group, double weight_decay) {
  if (!(weight_decay >= 0)) {
    throw Error("the weight decay is " + number_text(weight_decay) + "; it must be at least 0");
  }
  using namespace torch::optim;
  const bool is_set =
      set_weight_decay_of<SGDOptions, AdamOptions, AdamWOptions, AdagradOptions, RMSpropOptions, LayerWise>(
          group.options(), weight_decay);
  if (!is_set) {
    throw Error(
        "set_weight_decay knows the options of SGD, Adam, AdamW, Adagrad, RMSprop, Lars and Lamb, and this "
        "group's are of another optimizer; set them yourself in group.options()");
  }
}

}  // namespace lockstep

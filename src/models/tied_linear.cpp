#include <lockstep/base/error.hpp>
#include <lockstep/models/linear.hpp>
#include <lockstep/models/tied_linear.hpp>

#include <ostream>

namespace lockstep {

const at::Tensor& Tied::tied_weight() const {
  if (is_tied()) return weight_;
  throw Error("a layer that is tied to " + parameter_ +
              " does not have it: call tie_layers(*net) with the whole network, once it is made or cloned");
}

at::Tensor TiedLinearImpl::forward(const at::Tensor& x) {
  return fast_linear(x, tied_weight());
}

void TiedLinearImpl::pretty_print(std::ostream& out) const {
  out << "lockstep::TiedLinear(" << tied_to() << ")";
}

void tie_layers(torch::nn::Module& net) {
  // The loop leaves out `net` itself, since a constructor may call this.
  for (const auto& module : net.modules(/*include_self=*/false)) {
    auto* const layer = dynamic_cast<Tied*>(module.get());
    if (layer == nullptr) continue;
    const auto parameters = net.named_parameters();
    const at::Tensor* const parameter = parameters.find(layer->tied_to());
    if (parameter == nullptr) {
      std::string names;
      for (const auto& name : parameters.keys()) names += (names.empty() ? "" : ", ") + name;
      throw Error("tie_layers: a layer is tied to " + layer->tied_to() + ", and the network's parameters are " +
                  (names.empty() ? "none" : names));
    }
    layer->tie(*parameter);
  }
}

}  // namespace lockstep

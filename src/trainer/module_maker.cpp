#include <ATen/Context.h>
#include <lockstep/base/error.hpp>
#include <lockstep/trainer/module_maker.hpp>

namespace lockstep {

std::shared_ptr<torch::nn::Module> MadeModule::whole() const {
  return module ? module : layers.ptr();
}

MadeModule ModuleMaker::operator()(Rank& rank, uint64_t seed) const {
  MadeModule made = make_(rank, seed);
  if (!made.layers.is_empty() && made.layers->size() > 0) return made;
  throw Error(rank.name() + ": the function that makes the network gave a null module, or a Sequential without layers",
              {.options = {"module"}});
}

MadeModule ModuleMaker::in_turn(Rank& rank, uint64_t seed, const std::function<MadeModule()>& make) {
  return rank.in_turn([&] {
    at::manual_seed(seed);
    return make();
  });
}

}  // namespace lockstep

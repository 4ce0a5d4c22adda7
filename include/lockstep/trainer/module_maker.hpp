// ModuleMaker: a function that makes a network, whatever the type of the module.
//
// Every rank calls it once. Make all modules equal. Copies share the function. A module needs one forward, from
// a tensor, or from a whole Batch, to a tensor. A torch::nn::Sequential can be split by layers and channels, any other
// module by data alone.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/pimpl.h>
#include <lockstep/data/sample_function.hpp>
#include <lockstep/ranks/rank.hpp>

#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>
#include <type_traits>
#include <utility>

namespace lockstep {

// Has a network as layers. A module that is no Sequential is one layer.
struct MadeModule {
  torch::nn::Sequential layers = nullptr;
  std::shared_ptr<torch::nn::Module> module = nullptr;  // null: the layers are the module
  bool takes_batch = false;                             // the only layer's forward takes a Batch

  std::shared_ptr<torch::nn::Module> whole() const;
};

class ModuleMaker {
 public:
  // make() returns a module by value, a module holder (TORCH_MODULE) or a shared_ptr. It may draw from LibTorch's
  // generator: ranks call it one after the other, each with the run's seed set.
  template <std::invocable Make>
  ModuleMaker(Make make)
      : make_([make = std::move(make)](Rank& rank, uint64_t seed) {
          return in_turn(rank, seed, [&] { return made(make()); });
        }) {}

  // make(seed) draws from a generator of its own. Give a thread-safe function, since ranks call it at the same time.
  template <std::invocable<uint64_t> Make>
  ModuleMaker(Make make) : make_([make = std::move(make)](Rank&, uint64_t seed) { return made(make(seed)); }) {}

  // Call it on all ranks. Throws Error if the function made a null module.
  MadeModule operator()(Rank& rank, uint64_t seed) const;

 private:
  static MadeModule in_turn(Rank& rank, uint64_t seed, const std::function<MadeModule()>& make);

  template <class Module>
  static MadeModule made(std::shared_ptr<Module> module) {
    static_assert(std::derived_from<Module, torch::nn::Module>, "what the function makes is no torch::nn::Module");
    if (!module) return {};
    if constexpr (requires { typename std::type_identity_t<decltype(&Module::forward)>; }) {
      static_assert(std::is_invocable_r_v<at::Tensor, decltype(&Module::forward), Module&, at::Tensor> ||
                        std::is_invocable_r_v<at::Tensor, decltype(&Module::forward), Module&, const Batch&>,
                    "a module's forward must take a torch::Tensor, or a lockstep::Batch, and return a torch::Tensor");
      MadeModule one{.layers = torch::nn::Sequential(), .module = module, .takes_batch = detail::TakesBatch<Module>};
      one.layers->push_back("net", std::move(module));
      return one;
    } else {  // a Sequential's forward is a template
      static_assert(std::derived_from<Module, torch::nn::SequentialImpl>,
                    "the module needs one forward, neither overloaded nor a template");
      return {.layers = torch::nn::Sequential(std::shared_ptr<torch::nn::SequentialImpl>(std::move(module)))};
    }
  }
  template <class Module>
  static MadeModule made(const torch::nn::ModuleHolder<Module>& holder) {
    return made(holder.is_empty() ? std::shared_ptr<Module>() : holder.ptr());
  }
  template <std::derived_from<torch::nn::Module> Module>
  static MadeModule made(Module module) {
    return made(std::make_shared<Module>(std::move(module)));
  }

  std::function<MadeModule(Rank& rank, uint64_t seed)> make_;
};

}  // namespace lockstep

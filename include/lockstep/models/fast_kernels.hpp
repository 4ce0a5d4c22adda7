// FastKernels: computes the linear layers, 3 x 3 convolutions and causal attention of any net by lockstep's kernels for
// CPUs, in one scope of one thread.
//
//   torch::Tensor forward(const torch::Tensor& x) {  // of a net of yours, with torch::nn::Linear, Conv2d, …
//     const lockstep::FastKernels fast;
//     …
//
// The net stays as it is: its modules, names, parameters and files. Results are LibTorch's but for rounding.
// Thread-safe for different threads. What it brings, and where nothing: docs/results/2026-11-29-plain-modules.md.
#pragma once

namespace lockstep {

// While it lives, linear layers compute as fast_linear() does, and 3 x 3 convolutions by Winograd's algorithm: those of
// torch::nn's modules and functions, also within a MultiheadAttention, and products with a transposed matrix. A causal
// at::scaled_dot_product_attention() without mask, dropout and scale computes as causal_attention() does. For that,
// queries, keys and values must have equal shapes [n, heads, length, size], and length must be a multiple of 64.
// Convolutions gain if the net is channels-last (set_memory_format()). All else stays LibTorch's: GPUs, other types
// than float32, autocast, torch::InferenceMode. A backward computes as its forward did, inside of the scope or not.
// Take it in a net's forward, or on all ranks for a whole loop; by grains bits depend on it. Scopes nest; with enabled
// = false LibTorch's kernels compute inside.
class [[nodiscard]] FastKernels {
 public:
  explicit FastKernels(bool enabled = true);
  ~FastKernels();
  FastKernels& operator=(FastKernels&&) = delete;

 private:
  const bool before_;
};

}  // namespace lockstep

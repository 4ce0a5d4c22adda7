// Gpt is a language model, a decoder of transformer blocks (Radford et al. 2019, "Language Models are Unsupervised
// Multitask Learners"). It has pre-LayerNorm, causal attention, learned positions, and a head tied to the embedding.
//
// A Gpt is a torch::nn::Sequential of the layers below, and can be split by layers and by channels. The attention is
// causal_attention() below, which on CPUs never holds the matrix of all scores. First weights depend on
// the low 32 bits of the seed alone. Use it from one thread at a time, like LibTorch's modules.
#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/pimpl.h>
#include <lockstep/models/models.hpp>
#include <lockstep/models/tied_linear.hpp>
#include <lockstep/nn/dropout.hpp>

#include <cstdint>

namespace lockstep {

// Embeds tokens and their places: [n, length], int64 from 0 to vocabulary - 1, length at most the context ->
// [n, length, embedding]. Returns the sum of both embeddings, with residual dropout. forward() throws Error for another
// type or shape.
class GptEmbeddingImpl : public torch::nn::Cloneable<GptEmbeddingImpl> {
 public:
  explicit GptEmbeddingImpl(const GptOptions& options) : options(options) { GptEmbeddingImpl::reset(); }
  void reset() override;
  at::Tensor forward(const at::Tensor& tokens);

  GptOptions options;
  torch::nn::Embedding tokens{nullptr}, positions{nullptr};
  Dropout dropout{nullptr};
};
TORCH_MODULE(GptEmbedding);

// Computes y = x + projection(attention(qkv(norm1(x)))), then y + down(gelu(up(norm2(y)))). Both sums have residual
// dropout (Vaswani et al. 2017, section 5.4). [n, length, embedding] -> the same.
class GptBlockImpl : public torch::nn::Cloneable<GptBlockImpl> {
 public:
  explicit GptBlockImpl(const GptOptions& options) : options(options) { GptBlockImpl::reset(); }
  void reset() override;
  at::Tensor forward(const at::Tensor& x);

  GptOptions options;
  torch::nn::LayerNorm norm1{nullptr}, norm2{nullptr};
  torch::nn::Linear qkv{nullptr}, projection{nullptr};  // qkv: queries, then keys, then values, of all heads
  torch::nn::Linear up{nullptr}, down{nullptr};         // up has four times as many units
  Dropout dropout1{nullptr}, dropout2{nullptr};
};
TORCH_MODULE(GptBlock);

// Lets each head's queries look among the keys of the same and earlier tokens:
// [n, length, 3 * heads * size] -> [n, length, heads * size]. On CPUs with AVX-512 oneDNN's micro-kernel multiplies
// float32 where that pays (docs/decisions/0080-micro-kernel.md). Else LibTorch's scaled_dot_product_attention()
// computes.
at::Tensor causal_attention(const at::Tensor& qkv, int64_t heads);

// Gives the mean cross-entropy over all tokens: logits [n, length, vocabulary], targets [n, length], int64.
at::Tensor token_cross_entropy(const at::Tensor& logits, const at::Tensor& targets);

// Maps [n, length] tokens to [n, length, vocabulary] logits of the next token. The layers are embedding, block1,
// block2, …, norm, head; by default they have 842,496 parameters. Throws Error for a size below 1 or above its limit,
// which the text names, for heads that do not divide the embedding, and for a dropout that is not in [0, 1).
class GptImpl : public NamedSequentialImpl {
 public:
  explicit GptImpl(const GptOptions& options = {});
};
TORCH_MODULE(Gpt);

}  // namespace lockstep

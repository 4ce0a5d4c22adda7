// Models: has the section's LeNet as a list of weights and a function, and LeNet, an MLP, AlexNet and ResNet-18 as
// modules. gpt.hpp has one more, a language model.
//
// Every module is a torch::nn::Sequential of named layers, so that it can be split by layers and by channels. A
// generator of its own draws the first weights. So weights depend on the low 32 bits of the seed alone, and neither on
// the platform nor on other threads. Thread-safe: no shared state. Memory: a module's parameters, float32 on the CPU.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>
#include <lockstep/models/conv_relu_pool.hpp>
#include <lockstep/models/linear.hpp>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace lockstep {

// ---- By name -------------------------------------------------------------------------------------------------------

struct ModelOptions {
  std::string name = "lenet";  // one of model_names()
  double width = 1;            // mlp, alexnet, resnet18: the numbers of channels and units are multiplied by this
  int64_t image_size = 0;      // alexnet, resnet18: images are resized to this height and width; 0: the model's own
  int64_t groups = 1;          // alexnet: 2 makes two towers
  double dropout = 0.5;        // the dropout of alexnet's two wide layers, see AlexNetOptions
  // gpt's sizes, see GptOptions.
  int64_t layers = 4, heads = 4, embedding = 128, context = 128;
  double residual_dropout = 0;
};

std::vector<std::string> model_names();

// Makes the model for images [n, 1, 28, 28] and 10 classes, or gpt's for bytes of text, with the weights of this seed.
// Throws Error as check_model does.
torch::nn::Sequential make_model(const ModelOptions& options, uint64_t seed = 0);

// Throws Error for what make_model cannot make: an unknown name (the text lists the known ones), a width that is not
// above 0 or is above 64, an image size that is too small for the model, sizes of gpt that do not go together, and an
// option that the model does not have.
void check_model(const ModelOptions& options);

// Gives the model's loss: (y_hat, y) of samples -> their mean cross-entropy, one number. gpt's mean is over all tokens.
std::function<torch::Tensor(const torch::Tensor& y_hat, const torch::Tensor& y)> model_loss(
    const ModelOptions& options);

// Tells whether the model learns the next byte of a text, as gpt does. All other models learn classes of images.
bool learns_text(const ModelOptions& options);

// Gives the format of weights and images (memory_format.hpp) in which the model trains fastest on such a device, as far
// as that was measured (docs/results/2026-11-24-channels-last.md), and otherwise at::MemoryFormat::Contiguous.
at::MemoryFormat fast_memory_format(const ModelOptions& options, const c10::Device& device);

// Describes the model by its name and all options but the defaults: "alexnet, width 0.25, images of 96 x 96, 2 groups".
std::string to_string(const ModelOptions& options);

// ---- The section's LeNet, from scratch -----------------------------------------------------------------------------

// Gives W1 (20,1,3,3), b1 (20), W2 (50,20,5,5), b2 (50), W3 (800,128), b3 (128), W4 (128,10), b4 (10), in this order,
// on the CPU, float32. Weights are N(0, 0.01^2), biases zero. (Weights this small keep the loss near ln 10 = 2.30 for
// the first epoch.) Section: "A Toy Network".
std::vector<torch::Tensor> lenet_params(uint64_t seed = 0);

// Computes the network's 10 logits [n, 10] for images `x` [n, 1, 28, 28]. Give images with numbers in [0, 1], of the
// parameters' type and on their device. Section: `lenet(X, params)` ("A Toy Network"). Throws Error, which shows both
// shapes, for images of another shape, or for another number or shape of parameters than lenet_params gives.
torch::Tensor lenet(const torch::Tensor& x, const std::vector<torch::Tensor>& params);

// ---- As modules ----------------------------------------------------------------------------------------------------

// This Sequential's clone() keeps the names of its layers, which LibTorch's clone() numbers. Every model here is one.
class NamedSequentialImpl : public torch::nn::SequentialImpl {
 public:
  std::shared_ptr<torch::nn::Module> clone(const std::optional<torch::Device>& device = std::nullopt) const override;
};

// This is the section's network: conv1, conv2, flatten, fc1, relu, fc2. It has 129,068 parameters.
class LeNetImpl : public NamedSequentialImpl {
 public:
  // Makes a LeNet with the weights of lenet_params(seed).
  explicit LeNetImpl(uint64_t seed = 0);

  // Computes lenet(): [n, 1, 28, 28] -> logits [n, 10]. Throws Error for images of another shape.
  torch::Tensor forward(const torch::Tensor& x);

  ConvReluPool conv1, conv2;
  FastLinear fc1, fc2;
};
TORCH_MODULE(LeNet);

// Copies the list's values into the module, converted to its type and device. W3 and W4 are transposed, as
// torch::nn::Linear keeps them. Throws Error, before anything is changed, for another number of parameters or another
// shape. The text shows both.
void load_lenet_params(LeNet& net, const std::vector<torch::Tensor>& params);

// The other models start, as in the book, with Xavier's uniform weights ±sqrt(6 / (fan_in + fan_out)). Biases are zero,
// BatchNorm's weights 1. Constructors throw Error for sizes below 1, and as make_model does. A width multiplies the
// numbers of channels and units, rounded to a multiple of 8 and at least 8, so that they can be split. It does not
// change the numbers of inputs and classes.

struct MlpOptions {
  int64_t inputs = 28 * 28;                                    // the number of values per sample
  std::vector<int64_t> hidden = std::vector<int64_t>(6, 512);  // the number of units of each hidden layer
  int64_t classes = 10;
  uint64_t seed = 0;
};

// Takes `inputs` values per sample: [n, ...] -> [n, classes]. Layers are flatten, fc1, relu1, fc2, relu2, ...,
// output. By default they have 1,720,330 parameters. The book's MLP has one hidden layer of 256 units. This one has
// enough layers to split into stages.
class MlpImpl : public NamedSequentialImpl {
 public:
  explicit MlpImpl(const MlpOptions& options = {});
};
TORCH_MODULE(Mlp);

struct AlexNetOptions {
  int64_t in_channels = 1;
  int64_t classes = 10;
  double width = 1;
  int64_t image_size = 224;  // at least 65; images of another size are resized, bilinearly
  // The number of groups of channels in conv2, conv4 and conv5. 2 makes the two towers of 2012, which meet in conv3 and
  // in fc6 to fc8.
  int64_t groups = 1;
  double dropout = 0.5;  // the dropout of the values behind relu6 and relu7 (dropout.hpp); 0: no such layers
  uint64_t seed = 0;
};

// This is the book's AlexNet (section 8.1; Krizhevsky et al. 2012): [n, in_channels, height, width] -> [n, classes].
// Layers are resize, conv1, relu1, pool1, conv2, relu2, pool2, conv3, relu3, conv4, relu4, conv5, relu5, pool5,
// flatten, fc6, relu6, dropout6, fc7, relu7, dropout7, fc8. By default they have 46,764,746 parameters.
class AlexNetImpl : public NamedSequentialImpl {
 public:
  explicit AlexNetImpl(const AlexNetOptions& options = {});
};
TORCH_MODULE(AlexNet);

struct ResNet18Options {
  int64_t in_channels = 1;
  int64_t classes = 10;
  double width = 1;
  int64_t image_size = 0;  // at least 9: images are resized to this, bilinearly; 0: images are taken as they are
  uint64_t seed = 0;
};

// This is ResNet-18 (He et al. 2015) for small images, as in the section after ours: the first convolution is 3 x 3,
// and no pooling follows it. [n, in_channels, height, width] -> [n, classes]. Layers are [resize,] conv1, norm1, relu,
// block1 to block8 (ResidualBlock), pool, flatten, fc. By default they have 11,172,810 parameters. Convolutions have no
// biases, as in He's paper. The book's have biases, whose effect the normalisation behind them removes.
class ResNet18Impl : public NamedSequentialImpl {
 public:
  explicit ResNet18Impl(const ResNet18Options& options = {});
};
TORCH_MODULE(ResNet18);

// Holds the options of Gpt (gpt.hpp). Its weights begin as those of GPT-2, N(0, 0.02^2).
struct GptOptions {
  int64_t vocabulary = 256;  // the number of tokens there are; 256: bytes
  int64_t layers = 4;        // the number of blocks
  int64_t heads = 4;         // the number of heads of each attention; choose one that divides the embedding
  int64_t embedding = 128;   // the number of features of a token
  int64_t context = 128;     // the most tokens that an attention sees
  double dropout = 0;        // the dropout of all that is added to the residual stream (dropout.hpp)
  uint64_t seed = 0;
};

}  // namespace lockstep

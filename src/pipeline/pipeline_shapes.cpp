#include "pipeline_shapes.hpp"

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <c10/core/GradMode.h>
#include <lockstep/base/error.hpp>

#include "comm/arguments.hpp"
#include "pipeline_mail.hpp"

#include <utility>

namespace lockstep {

using comm::describe;

namespace {

// Two samples tell a mean over the samples from an output with one value per sample.
constexpr int64_t kTriedSamples = 2;
constexpr int64_t kMostDimensions = 16;

// Puts all modules into eval mode, and afterwards each into the mode that it had.
class EvalMode {
 public:
  explicit EvalMode(torch::nn::Sequential layers) {
    for (const auto& module : layers->modules()) before_.emplace_back(module, module->is_training());
    layers->eval();
  }
  ~EvalMode() {
    for (const auto& [module, training] : before_) module->train(training);  // outer ones first: they set inner ones
  }
  EvalMode& operator=(EvalMode&&) = delete;

 private:
  std::vector<std::pair<std::shared_ptr<torch::nn::Module>, bool>> before_;
};

// Packs a shape into a message of fixed length: the type, the memory format, the number of dimensions, the dimensions.
at::Tensor packed(const SampleShape& shape, const c10::Device& device) {
  std::vector<int64_t> numbers{static_cast<int64_t>(shape.type), static_cast<int64_t>(shape.format),
                               static_cast<int64_t>(shape.sizes.size())};
  numbers.insert(numbers.end(), shape.sizes.begin(), shape.sizes.end());
  numbers.resize(3 + kMostDimensions);
  return at::tensor(numbers, at::kLong).to(device);
}

SampleShape unpacked(const at::Tensor& message) {
  const at::Tensor numbers = message.cpu();
  const int64_t* const begin = numbers.const_data_ptr<int64_t>();
  return {.type = static_cast<at::ScalarType>(begin[0]),
          .sizes = {begin + 3, begin + 3 + begin[2]},
          .format = static_cast<at::MemoryFormat>(begin[1])};
}

SampleShape give_zeros(PipelineStage& stage, const SampleShape& input, const c10::Device& device) {
  const EvalMode eval(stage.layers());
  const at::Tensor y = stage.through(input.empty(kTriedSamples, device).zero_());
  if (y.defined() && y.dim() > 0 && y.dim() <= kMostDimensions && y.size(0) == kTriedSamples && y.is_floating_point()) {
    return sample_shape(y);
  }
  throw Error("Pipeline: stage " + std::to_string(stage.index()) + " makes of " + std::to_string(kTriedSamples) +
              " samples of " + input.text() + " " + (y.defined() ? describe(y) : "an undefined tensor") +
              "; a stage must give a tensor of floating point whose first dimension is the samples. Cut elsewhere");
}

}  // namespace

at::Tensor SampleShape::empty(int64_t samples, const c10::Device& device) const {
  std::vector<int64_t> all{samples};
  all.insert(all.end(), sizes.begin(), sizes.end());
  return at::empty(all, at::TensorOptions(device).dtype(type), format);
}

std::string SampleShape::text() const {
  std::string text = describe(at::empty({0}, type));  // "float [0]"
  text.resize(text.find('['));
  text += "[n";
  for (const int64_t size : sizes) text += ", " + std::to_string(size);
  return text + "]";
}

SampleShape sample_shape(const at::Tensor& x) {
  const bool pixels = x.suggest_memory_format() == at::MemoryFormat::ChannelsLast;
  return {.type = x.scalar_type(),
          .sizes = x.sizes().slice(1).vec(),
          .format = pixels ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Contiguous};
}

std::vector<SampleShape> dry_run_shapes(Rank& rank, std::vector<PipelineStage>& stages, int count,
                                        const SampleShape& input) {
  const c10::NoGradGuard no_grad;
  const int ranks = rank.world_size();
  const int next = (rank.index() + 1) % ranks, previous = (rank.index() + ranks - 1) % ranks;
  std::vector<SampleShape> shapes(static_cast<size_t>(count) + 1);
  shapes[0] = input;
  std::vector<c10::intrusive_ptr<c10d::Work>> sends;
  for (auto& stage : stages) {
    const auto index = static_cast<size_t>(stage.index());
    if (index > 0 && ranks > 1) {
      std::vector<at::Tensor> message{packed({}, rank.device())};
      rank.backend().recv(message, previous, kShapeTag)->wait();
      shapes[index] = unpacked(message[0]);
    }
    shapes[index + 1] = give_zeros(stage, shapes[index], rank.device());
    if (stage.index() + 1 < count && ranks > 1) {
      std::vector<at::Tensor> message{packed(shapes[index + 1], rank.device())};
      sends.push_back(rank.backend().send(message, next, kShapeTag));
    }
  }
  for (const auto& send : sends) send->wait();
  // Every rank must know the network's output, and none may go on before all stages were tried.
  const at::Tensor message = packed(shapes.back(), rank.device());
  rank.broadcast(message, ranks - 1);
  shapes.back() = unpacked(message);
  return shapes;
}

}  // namespace lockstep

// train(): the task that a run's options name: one of lockstep's models, on images or on a text.
#include <lockstep/trainer/trainer.hpp>

#include "train_options.hpp"
#include "workload.hpp"

namespace lockstep {
namespace {

// Tells people that the data are not Fashion-MNIST's, if so.
std::string remark_on(const ImageData& data, const DataDigests& digests) {
  if (data.synthetic || is_fashion_mnist(digests)) return "";
  return has_images_of_mnist(digests) ? " (the digits of MNIST)" : " (not the images as published)";
}

std::string warning_of_mnist(const ImageData& data, const DataDigests& digests) {
  if (!has_images_of_mnist(digests)) return "";
  return "the files in " + data.source +
         " have Fashion-MNIST's names, but hold the digits of MNIST; if clothes are meant, put Fashion-MNIST's files "
         "there";
}

Workload workload_of_text(const TrainOptions& options) {
  const TextData data = load_text(options.data.text, options.model.context);
  return {.task = task_of(options, data),
          .digests = digests_of(data.train, data.test),
          .announcement = data.source,
          .title = to_string(options.model) + " on " + options.data.text.filename().string()};
}

Workload workload_of(const TrainOptions& options) {
  if (learns_text(options.model)) return workload_of_text(options);
  const ImageData data = load_data(options.data);
  return workload_of_images(options, data, digests_of(data));
}

}  // namespace

Workload workload_of_images(const TrainOptions& options, const ImageData& data, const DataDigests& digests) {
  const std::string remark = remark_on(data, digests);
  const std::string name = data.synthetic ? data.source : std::string(to_string(options.data.source));
  return {.task = task_of(options, data),
          .digests = digests,
          .announcement = data.source + remark,
          .warning = warning_of_mnist(data, digests),
          .title = to_string(options.model) + " on " + name + remark};
}

Task task_of(const TrainOptions& options, const ImageData& data) {
  return {.name = options.model.name,
          .module = [model = options.model](uint64_t seed) { return make_model(model, seed); },
          .criterion = model_loss(options.model),
          .train = data.train,
          .test = data.test,
          .source = data.source,
          .accuracy = true};
}

Task task_of(const TrainOptions& options, const TextData& data) {
  return {.name = options.model.name,
          .module = [model = options.model](uint64_t seed) { return make_model(model, seed); },
          .criterion = model_loss(options.model),
          .train = data.train,
          .test = data.test,
          .source = data.source,
          .perplexity = true};
}

TrainResult train(const TrainOptions& options, const TrainCallbacks& callbacks) {
  const TrainOptions settings = checked(options);
  return run_workload(settings, callbacks, [&] { return workload_of(settings); });
}

}  // namespace lockstep

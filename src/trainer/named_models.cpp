// Makes the task that the options of train() name: one of lockstep's models, on images or on a text.
#include <lockstep/models/fuse_layers.hpp>
#include <lockstep/models/text.hpp>
#include <lockstep/trainer/trainer.hpp>

#include "flat_options.hpp"
#include "train_options.hpp"
#include "workload.hpp"

namespace lockstep {
namespace {

// Fused layers cannot be split by channels, and their BatchNorm cannot be made a SyncBatchNorm.
bool takes_fused_layers(const TrainOptions& options) {
  const auto split = flat(options).split;
  const bool splits_channels = split && split->mesh.tensor > 1;
  return !splits_channels && !options.sync_batchnorm;
}

Task task_of_samples(const TrainOptions& options, Samples train, Samples test, const std::string& source) {
  return {.name = options.model.name,
          .module =
              [model = options.model, fuses = takes_fused_layers(options)](uint64_t seed) {
                auto net = make_model(model, seed);
                if (fuses) fuse_layers(*net);
                return net;
              },
          .criterion = model_loss(options.model),
          .train = std::move(train),
          .test = std::move(test),
          .source = source};
}

}  // namespace

Task task_of(const TrainOptions& options, const ImageData& data) {
  Task task = task_of_samples(options, data.train, data.test, data.source);
  task.accuracy = true;
  return task;
}

Workload workload_of_images(const TrainOptions& options, const ImageData& data, const DataDigests& digests) {
  const bool is_mnist = has_images_of_mnist(digests);
  const bool is_known = data.synthetic || is_fashion_mnist(digests);
  const std::string remark = is_known ? "" : is_mnist ? " (the digits of MNIST)" : " (not the images as published)";
  const std::string name = data.synthetic ? data.source : std::string(to_string(flat(options).data));
  return {.task = task_of(options, data),
          .digests = digests,
          .announcement = data.source + remark,
          .warning = is_mnist ? "the files in " + data.source +
                                    " have Fashion-MNIST's names, but hold the digits of MNIST; if clothes are meant, "
                                    "put Fashion-MNIST's files there"
                              : "",
          .title = to_string(options.model) + " on " + name + remark};
}

Workload workload_of(const TrainOptions& options) {
  if (learns_text(options.model)) {
    const std::filesystem::path file = flat(options).text;
    const TextData data = load_text(file, options.model.context);
    Task task = task_of_samples(options, data.train, data.test, data.source);
    task.perplexity = true;
    return {.task = task,
            .digests = digests_of(data.train, data.test),
            .announcement = data.source,
            .title = to_string(options.model) + " on " + file.filename().string()};
  }
  const ImageData data = load_data(options.data);
  return workload_of_images(options, data, digests_of(data));
}

TrainResult train(const TrainOptions& options, const TrainCallbacks& callbacks) {
  const TrainOptions settings = checked(options);
  return run_workload(settings, callbacks, [&] { return workload_of(settings); });
}

}  // namespace lockstep

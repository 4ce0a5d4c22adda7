// RunFolder: the files that a run keeps, each replaced whole, so that what was written before a failure stays readable.
#pragma once

#include <torch/nn/module.h>
#include <lockstep/metrics.hpp>
#include <lockstep/trainer.hpp>

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

namespace lockstep {

class RunFolder {
 public:
  // Nothing is written yet. With an empty path nothing ever is. Throws Error if `folder` already holds a run.
  explicit RunFolder(std::filesystem::path folder);

  // Makes the folder and writes config.json. Throws Error, and leaves nothing behind, if that is not possible.
  void create(const TrainOptions& options);

  using Warn = std::function<void(const std::string&)>;

  // After each epoch: metrics.jsonl, model.safetensors and curve.svg. A curve that cannot be drawn is a
  // warning, and not tried again.
  void write(const std::vector<EpochMetrics>& history, const torch::nn::Module& module, const std::string& title,
             const Warn& warn);

  // At the end, however it came: curve.png.
  void finish(const std::vector<EpochMetrics>& history, const std::string& title, const Warn& warn);

 private:
  void draw(const char* name, const std::vector<EpochMetrics>& history, const std::string& title, const Warn& warn);

  std::filesystem::path folder_;
  bool can_draw_ = true;
};

}  // namespace lockstep

#include "run_folder.hpp"

#include <lockstep/checkpoint.hpp>
#include <lockstep/error.hpp>

#include "io/atomic_file.hpp"
#include "train_options.hpp"

#include <system_error>

namespace lockstep {
namespace fs = std::filesystem;

RunFolder::RunFolder(fs::path folder) : folder_(std::move(folder)) {
  std::error_code ignored;
  if (!folder_.empty() && fs::exists(folder_ / kConfigFile, ignored)) {
    throw Error(folder_.string() + " already holds a run; choose another name, or move it away");
  }
}

void RunFolder::create(const TrainOptions& options) {
  if (folder_.empty()) return;
  // The topmost folder that has to be made: what to take away again if something fails.
  fs::path made;
  for (fs::path path = fs::absolute(folder_).lexically_normal(); !fs::exists(fs::symlink_status(path));
       path = path.parent_path())
    made = path;
  try {
    std::error_code error;
    fs::create_directories(folder_, error);
    if (error) throw Error("cannot make the run's folder " + folder_.string() + ": " + error.message());
    io::write_file(folder_ / kConfigFile, to_json(options));
  } catch (...) {
    std::error_code ignored;
    if (!made.empty()) fs::remove_all(made, ignored);
    throw;
  }
}

void RunFolder::write(const std::vector<EpochMetrics>& history, const torch::nn::Module& module,
                      const std::string& title, const Warn& warn) {
  if (folder_.empty()) return;
  write_metrics(folder_ / kMetricsFile, history);
  save_weights(folder_ / kWeightsFile, module);
  draw("curve.svg", history, title, warn);
}

void RunFolder::finish(const std::vector<EpochMetrics>& history, const std::string& title, const Warn& warn) {
  if (!folder_.empty() && !history.empty()) draw("curve.png", history, title, warn);
}

void RunFolder::draw(const char* name, const std::vector<EpochMetrics>& history, const std::string& title,
                     const Warn& warn) {
  if (!can_draw_) return;
  try {
    draw_curve(folder_ / name, history, title);
  } catch (const Error& error) {
    can_draw_ = false;
    if (warn) warn(error.what());
  }
}

}  // namespace lockstep

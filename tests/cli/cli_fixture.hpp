// The tests of the program share small data, a folder to work in, and the flags of a run of a second.
#pragma once

#include <gmock/gmock.h>
#include <lockstep/trainer/metrics.hpp>

#include "program.hpp"
#include "support/report_data.hpp"
#include "support/small_images.hpp"

#include <string>
#include <vector>

namespace lockstep {

class Cli : public testing::Test {
 protected:
  Cli() { write_small_images(images_, 300, 100); }

  Surroundings surroundings() const {
    return {.folder = work_.path(), .environment = {"PATH=/usr/bin:/bin", "LC_ALL=C.UTF-8"}};
  }

  // `lockstep train` on the small images with `more` flags; two epochs on two ranks if those do not say otherwise.
  std::vector<std::string> train(const std::vector<std::string>& more = {}) const {
    std::vector<std::string> arguments = {
        "train", "--data-dir", images_.path().string(), "--batch-size", "32", "--devices", "2xcpu", "--epochs", "2"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return arguments;
  }

  std::vector<EpochMetrics> metrics(const std::string& run) const {
    return read_metrics(work_ / "runs" / run / "metrics.jsonl");
  }

  const ScratchFolder images_;
  const ScratchFolder work_;
};

// The lines of a text, without their ends.
inline std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    lines.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return lines;
}

}  // namespace lockstep

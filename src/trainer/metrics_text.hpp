// Writes and reads the text of metrics.jsonl, which checkpoints hold as well: a JSON object per line and epoch.
#pragma once

#include <lockstep/trainer/metrics.hpp>

#include <filesystem>
#include <istream>
#include <string>
#include <vector>

namespace lockstep {

std::string metrics_text(const std::vector<EpochMetrics>& history, bool synthetic = false);

// Throws Error that names the line and the file, `source`.
std::vector<EpochMetrics> metrics_from(std::istream& in, const std::filesystem::path& source);

}  // namespace lockstep

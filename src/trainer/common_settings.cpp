#include "common_settings.hpp"

#include "option_table.hpp"
#include "option_text.hpp"

#include <string_view>

namespace lockstep {

bool keeps_checkpoints(const TrainOptions& options) {
  return !options.keep.run_dir.empty() && options.keep.checkpoints;
}

std::string common_settings(const TrainOptions& options, const DataDigests& data, const RunState* resumed) {
  std::string text = options.keep.trace.empty() ? "not traced" : "traced";
  each_option(options, [&](const Option& option, const auto& value) {
    if (option.same == Same::nowhere || !says_something(option, options) || option.key == std::string_view("seed"))
      return;
    text += std::string(", ") + option.key + " " + option_text(value);
  });
  if (keeps_checkpoints(options))
    text += ", checkpoints every " + std::to_string(options.keep.checkpoints->every) + " steps";
  if (resumed != nullptr) {
    text += ", resumed " + std::to_string(resumed->steps) + " steps after epoch " + std::to_string(resumed->epochs);
  }
  for (const auto& part : kDataParts) text += std::string(", ") + part.name + " of SHA-256 " + data.*part.digest;
  return text;
}

}  // namespace lockstep

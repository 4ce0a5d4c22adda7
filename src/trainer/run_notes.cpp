#include "run_notes.hpp"

#include "layout/split_json.hpp"

#include <algorithm>
#include <fstream>
#include <utility>

namespace lockstep {

using Json = nlohmann::ordered_json;

void RunNotes::set(const char* key, Json value) {
  const std::lock_guard lock(mutex_);
  notes_[key] = std::move(value);
}

void RunNotes::set(const RankLayout& layout) {
  set("ranks", layout.names);
  set("split", to_json(layout.split));
  set("samples", layout.samples);
  set("tensors", layout.tensors);
}

void RunNotes::warn(const std::string& text) {
  const std::lock_guard lock(mutex_);
  add_warning(text);
}

void RunNotes::add_warning(const Json& text) {
  Json& warnings = notes_["warnings"];
  if (std::count(warnings.begin(), warnings.end(), text) == 0) warnings.push_back(text);
}

void RunNotes::take(const std::filesystem::path& file) {
  std::ifstream in(file);
  Json earlier = Json::parse(in, nullptr, /*allow_exceptions=*/false);
  if (!earlier.is_object()) return;
  if (!earlier["warnings"].is_array()) earlier["warnings"] = Json::array();
  const std::lock_guard lock(mutex_);
  Json texts = std::exchange(notes_["warnings"], earlier["warnings"]);
  earlier.erase("warnings");
  for (auto& item : earlier.items()) {
    if (!notes_.contains(item.key())) notes_[item.key()] = std::move(item.value());
  }
  for (auto& text : texts) add_warning(text);
}

std::string RunNotes::text() const {
  const std::lock_guard lock(mutex_);
  return notes_.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace lockstep

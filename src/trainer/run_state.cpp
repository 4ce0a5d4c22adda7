#include "run_state.hpp"

#include <lockstep/base/error.hpp>
#include <nlohmann/json.hpp>

#include <map>
#include <utility>

#include "base/classic.hpp"
#include "base/number_text.hpp"
#include "io/json_fields.hpp"
#include "metrics_text.hpp"

namespace lockstep {
namespace {

constexpr const char* manifest_key = "lockstep-run";
constexpr int format_version = 1;
constexpr double most_seconds = 1e9;  // seconds of thirty years

std::string header_text(const std::map<std::string, std::string>& metadata, const char* key) {
  const auto entry = metadata.find(key);
  if (entry != metadata.end()) return entry->second;
  throw Error("it is no checkpoint of `lockstep train`, which has \"" + std::string(key) +
                  "\" in its header (a run's model.safetensors has weights alone)",
              {Error::file});
}

DataDigests parse_data(JsonFields fields) {
  DataDigests data;
  for (const auto& part : kDataParts) data.*part.digest = fields.required<std::string>(part.key);
  fields.no_more();
  return data;
}

}  // namespace

std::string manifest_of(const RunState& state) {
  nlohmann::ordered_json manifest;
  manifest["format"] = format_version;
  manifest["epochs"] = state.epochs;
  manifest["steps"] = state.steps;
  manifest["seconds"] = state.seconds;
  manifest["metrics"] = metrics_text(state.history);
  manifest["config"] = state.config;
  if (!state.processor.empty()) manifest["processor"] = state.processor;
  if (state.data) {
    for (const auto& part : kDataParts) manifest["data"][part.key] = (*state.data).*part.digest;
  }
  return manifest.dump();
}

RunState parse_manifest(const std::string& manifest) {
  auto fields = JsonFields::parse(manifest, "its manifest");
  const int version = fields.required<int>("format");
  if (version != format_version) {
    throw Error("its format is version " + std::to_string(version) + ", and this lockstep reads version " +
                    std::to_string(format_version),
                {Error::file});
  }
  RunState state{.epochs = fields.required<int>("epochs"),
                 .steps = fields.required<int64_t>("steps"),
                 .seconds = fields.required<double>("seconds"),
                 .history = {},
                 .config = fields.required<std::string>("config"),
                 .tensors = {}};
  Classic<std::istringstream> metrics(fields.required<std::string>("metrics"));
  state.history = metrics_from(metrics, "its metrics");
  if (fields.has("processor")) state.processor = fields.required<std::string>("processor");
  if (fields.has("data")) state.data = parse_data(fields.object("data"));
  fields.no_more();
  if (state.epochs < 0 || state.steps < 0) {
    throw Error("its manifest says that it is " + std::to_string(state.steps) + " steps after epoch " +
                    std::to_string(state.epochs) + ", and neither can be negative",
                {Error::file});
  }
  if (!(state.seconds >= 0 && state.seconds <= most_seconds)) {  // this refuses NaN too
    throw Error("its manifest says that its steps took " + number_text(state.seconds) + " seconds", {Error::file});
  }
  return state;
}

void write_run_state(const std::filesystem::path& file, const RunState& state, io::FileSystem& files) {
  io::NamedTensors here;
  for (const auto& [name, tensor] : state.tensors) here.emplace_back(name, io::as_in_a_file(tensor));
  std::map<std::string, std::string> metadata = {{"format", "pt"}, {manifest_key, manifest_of(state)}};
  metadata.emplace(io::kDigestKey, io::digest_of(metadata, here));
  io::write_safetensors(file, here, metadata, files);
}

RunState read_run_state(const std::filesystem::path& file) {
  std::map<std::string, std::string> metadata;
  io::NamedTensors tensors = io::read_safetensors(file, &metadata);
  try {
    const std::string manifest = header_text(metadata, manifest_key);
    header_text(metadata, io::kDigestKey);
    io::check_digest(metadata, tensors);
    RunState state = parse_manifest(manifest);
    state.tensors = std::move(tensors);
    return state;
  } catch (const Error& error) {
    throw Error("cannot go on from '" + file.string() + "': " + error.what(), {Error::file});
  }
}

io::NamedTensors tensors_under(const std::string& prefix, const io::NamedTensors& tensors) {
  io::NamedTensors under;
  for (const auto& [name, tensor] : tensors) {
    if (name.starts_with(prefix + ".")) under.emplace_back(name.substr(prefix.size() + 1), tensor);
  }
  return under;
}

void put_under(const std::string& prefix, const io::NamedTensors& tensors, io::NamedTensors& into) {
  for (const auto& [name, tensor] : tensors) into.emplace_back(prefix + "." + name, tensor);
}

io::NamedTensors tables_of_all_ranks(const io::NamedTensors& mine, Rank& rank) {
  io::NamedTensors tables;
  for (const auto& [name, tensor] : mine) tables.emplace_back(name, rank.allgather(tensor.to(rank.device())));
  return tables;
}

void check_tables(const RunState& state) {
  bool has_totals = false;
  for (const auto& [name, table] : tensors_under("ranks", state.tensors)) {
    const auto is = [&, &table = table](int64_t dimensions, at::ScalarType type) {
      return table.dim() == dimensions && table.scalar_type() == type;
    };
    if (name == "totals") has_totals = true;
    const bool fits = name == "totals"  ? is(2, at::kDouble) && table.size(1) == 4
                      : name == "rng"   ? is(2, at::kByte)
                      : name == "order" ? is(2, at::kLong)
                                        : table.dim() > 0;
    if (fits && table.size(0) > 0) continue;
    throw Error("cannot go on: the checkpoint's tensor 'ranks." + name + "' is no table with a row for each rank",
                {Error::file});
  }
  if (state.steps > 0 && !has_totals) {
    throw Error("cannot go on: the checkpoint is of within an epoch, and lacks the tensor 'ranks.totals'",
                {Error::file});
  }
}

}  // namespace lockstep

#include "run_state.hpp"

#include <lockstep/error.hpp>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <map>
#include <sstream>
#include <utility>

#include "io/digest.hpp"
#include "json_fields.hpp"
#include "metrics_text.hpp"

namespace lockstep {
namespace {

constexpr const char* manifest_key = "lockstep-run";
constexpr const char* digest_key = "sha256";
constexpr int format_version = 1;

std::string manifest_of(const RunState& state) {
  nlohmann::ordered_json manifest;
  manifest["format"] = format_version;
  manifest["epochs"] = state.epochs;
  manifest["steps"] = state.steps;
  manifest["seconds"] = state.seconds;
  manifest["metrics"] = metrics_text(state.history);
  manifest["config"] = state.config;
  return manifest.dump();
}

// Of the header's texts and of the tensors by name, all on the CPU and contiguous.
std::string digest_of(const std::map<std::string, std::string>& metadata, const io::NamedTensors& tensors) {
  io::Digest digest("SHA256");
  for (const auto& [key, value] : metadata) digest.update(key + '\n' + value + '\n');
  for (const auto& [name, tensor] : std::map<std::string, at::Tensor>(tensors.begin(), tensors.end())) {
    std::ostringstream title;
    title << '\n' << name << ' ' << c10::toString(tensor.scalar_type()) << ' ' << tensor.sizes() << '\n';
    digest.update(title.str());
    digest.update(tensor.const_data_ptr(), tensor.nbytes());
  }
  return digest.hex();
}

std::string header_text(const std::map<std::string, std::string>& metadata, const char* key) {
  const auto entry = metadata.find(key);
  if (entry != metadata.end()) return entry->second;
  throw Error("it is no checkpoint of `lockstep train`, which has \"" + std::string(key) +
              "\" in its header (a run's model.safetensors has weights alone)");
}

RunState parse_manifest(const std::string& manifest) {
  auto fields = JsonFields::parse(manifest, "its manifest");
  const int version = fields.required<int>("format");
  if (version != format_version) {
    throw Error("its format is version " + std::to_string(version) + ", and this lockstep reads version " +
                std::to_string(format_version));
  }
  RunState state{.epochs = fields.required<int>("epochs"),
                 .steps = fields.required<int64_t>("steps"),
                 .seconds = fields.required<double>("seconds"),
                 .history = {},
                 .config = fields.required<std::string>("config"),
                 .tensors = {}};
  std::istringstream metrics(fields.required<std::string>("metrics"));
  state.history = metrics_from(metrics, "its metrics");
  fields.no_more();
  return state;
}

}  // namespace

void write_run_state(const std::filesystem::path& file, const RunState& state, io::FileSystem& files) {
  io::NamedTensors here;
  for (const auto& [name, tensor] : state.tensors) here.emplace_back(name, tensor.detach().cpu().contiguous());
  std::map<std::string, std::string> metadata = {{"format", "pt"}, {manifest_key, manifest_of(state)}};
  metadata.emplace(digest_key, digest_of(metadata, here));
  io::write_safetensors(file, here, metadata, files);
}

RunState read_run_state(const std::filesystem::path& file) {
  std::map<std::string, std::string> metadata;
  io::NamedTensors tensors = io::read_safetensors(file, &metadata);
  try {
    const std::string manifest = header_text(metadata, manifest_key);
    const std::string written = header_text(metadata, digest_key);
    metadata.erase(digest_key);
    if (const auto digest = digest_of(metadata, tensors); digest != written) {
      throw Error("it is damaged: its SHA-256 is " + digest + ", and was " + written + " when it was written");
    }
    RunState state = parse_manifest(manifest);
    state.tensors = std::move(tensors);
    return state;
  } catch (const Error& error) {
    throw Error("cannot go on from '" + file.string() + "': " + error.what());
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

}  // namespace lockstep

#include <lockstep/checkpoint.hpp>
#include <lockstep/error.hpp>

#include "io/safetensors.hpp"
#include "module_state.hpp"

namespace lockstep {

void save_weights(const std::filesystem::path& file, const torch::nn::Module& module,
                  const std::map<std::string, std::string>& metadata) {
  io::NamedTensors here;
  for (const auto& [name, tensor] : state_of(module)) here.emplace_back(name, tensor.detach().cpu().contiguous());
  std::map<std::string, std::string> texts = metadata;
  texts.emplace("format", "pt");
  texts.erase(io::kDigestKey);
  texts.emplace(io::kDigestKey, io::digest_of(texts, here));
  io::write_safetensors(file, here, texts);
}

void load_weights(const std::filesystem::path& file, torch::nn::Module& module) {
  const std::string what = "cannot load '" + file.string() + "'";
  std::map<std::string, std::string> metadata;
  const io::NamedTensors tensors = io::read_safetensors(file, &metadata);
  try {
    io::check_digest(metadata, tensors);
  } catch (const Error& error) {
    throw Error(what + ": " + error.what() + "; take another copy, or train anew");
  }
  load_state(tensors, module, what);
}

}  // namespace lockstep

#include "checked_tensors.hpp"

namespace lockstep::io {

void write_checked(const std::filesystem::path& file, const NamedTensors& tensors,
                   const std::map<std::string, std::string>& metadata) {
  NamedTensors here;
  if (const std::string why = what_a_file_lacks(tensors); !why.empty())
    throw Error("cannot write '" + file.string() + "': " + why, {Error::file});
  for (const auto& [name, tensor] : tensors) here.emplace_back(name, as_in_a_file(tensor));
  std::map<std::string, std::string> texts = metadata;
  texts.emplace("format", "pt");
  texts.erase(kDigestKey);
  texts.emplace(kDigestKey, digest_of(texts, here));
  write_safetensors(file, here, texts);
}

std::string cannot_load(const std::filesystem::path& file) {
  return "cannot load '" + file.string() + "'";
}

NamedTensors read_checked(const std::filesystem::path& file, std::map<std::string, std::string>* metadata) {
  std::map<std::string, std::string> texts;
  NamedTensors tensors = read_safetensors(file, &texts);
  try {
    check_digest(texts, tensors);
  } catch (const Error& error) {
    throw Error(cannot_load(file) + ": " + error.what() + "; take another copy, or train anew", error.data());
  }
  if (metadata != nullptr) *metadata = std::move(texts);
  return tensors;
}

}  // namespace lockstep::io

#include <lockstep/base/error.hpp>
#include <lockstep/nn/tensor_files.hpp>
#include <lockstep/nn/weights.hpp>

#include "io/checked_tensors.hpp"
#include "module_state.hpp"

namespace lockstep {

void save_weights(const std::filesystem::path& file, const torch::nn::Module& module,
                  const std::map<std::string, std::string>& metadata) {
  io::write_checked(file, state_of(module), metadata);
}

UnmatchedNames load_weights(const std::filesystem::path& file, torch::nn::Module& module, bool strict) {
  return load_state(io::read_checked(file), module, io::cannot_load(file), strict);
}

void save_tensors(const std::filesystem::path& file, const Dataset::Tensors& tensors,
                  const std::map<std::string, std::string>& metadata) {
  for (const auto& [name, tensor] : tensors) {
    if (!tensor.defined()) throw Error("cannot write '" + file.string() + "': tensor '" + name + "' is undefined");
  }
  io::write_checked(file, io::NamedTensors(tensors.begin(), tensors.end()), metadata);
}

Dataset::Tensors load_tensors(const std::filesystem::path& file) {
  const io::NamedTensors tensors = io::read_checked(file);
  return {tensors.begin(), tensors.end()};
}

std::string weights_hash(const torch::nn::Module& module) {
  constexpr size_t digits = 16;
  return io::digest_of({}, state_of(module)).substr(0, digits);
}

}  // namespace lockstep

#include <lockstep/models/weights.hpp>

#include "io/checked_tensors.hpp"
#include "module_state.hpp"

namespace lockstep {

void save_weights(const std::filesystem::path& file, const torch::nn::Module& module,
                  const std::map<std::string, std::string>& metadata) {
  io::write_checked(file, state_of(module), metadata);
}

void load_weights(const std::filesystem::path& file, torch::nn::Module& module) {
  load_state(io::read_checked(file), module, io::cannot_load(file));
}

std::string weights_hash(const torch::nn::Module& module) {
  constexpr size_t digits = 16;
  return io::digest_of({}, state_of(module)).substr(0, digits);
}

}  // namespace lockstep

#include <lockstep/trainer/train_options.hpp>

#include "base/names.hpp"

#include <array>
#include <utility>

namespace lockstep {
namespace {

constexpr std::array precisions{std::pair{Precision::float32, "float32"}, std::pair{Precision::tf32, "tf32"},
                                std::pair{Precision::bf16, "bf16"}};
constexpr std::array memory_formats{std::pair{MemoryFormat::automatic, "auto"},
                                    std::pair{MemoryFormat::contiguous, "contiguous"},
                                    std::pair{MemoryFormat::channels_last, "channels-last"}};
constexpr std::array on_nans{std::pair{OnNan::stop, "stop"}, std::pair{OnNan::skip, "skip"},
                             std::pair{OnNan::go_on, "go-on"}};

}  // namespace

std::string_view to_string(Precision precision) {
  return name_in(precisions, precision);
}

std::string_view to_string(MemoryFormat format) {
  return name_in(memory_formats, format);
}

std::string_view to_string(OnNan on_nan) {
  return name_in(on_nans, on_nan);
}

Precision precision_from(std::string_view name) {
  return value_in(precisions, name, "the precision");
}

MemoryFormat memory_format_from(std::string_view name) {
  return value_in(memory_formats, name, "the memory format");
}

OnNan on_nan_from(std::string_view name) {
  return value_in(on_nans, name, "what becomes of a step that is not finite");
}

}  // namespace lockstep

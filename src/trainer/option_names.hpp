// Has the names of options' values, for to_string() and value_from().
#pragma once

#include <lockstep/trainer/train_options.hpp>

#include "base/names.hpp"

#include <array>
#include <string_view>
#include <utility>

namespace lockstep {

// Names<Value> has the names of a Value, and its name in errors.
template <class Value>
struct Names;

template <class Value>
concept Named = requires {
  Names<Value>::all;
};

template <>
struct Names<Precision> {
  static constexpr auto what = "the precision";
  static constexpr std::array all{std::pair{Precision::float32, "float32"}, std::pair{Precision::tf32, "tf32"},
                                  std::pair{Precision::bf16, "bf16"}};
};

template <>
struct Names<MemoryFormat> {
  static constexpr auto what = "the memory format";
  static constexpr std::array all{std::pair{MemoryFormat::automatic, "auto"},
                                  std::pair{MemoryFormat::contiguous, "contiguous"},
                                  std::pair{MemoryFormat::channels_last, "channels-last"}};
};

template <>
struct Names<OnNan> {
  static constexpr auto what = "what becomes of a step that is not finite";
  static constexpr std::array all{std::pair{OnNan::stop, "stop"}, std::pair{OnNan::skip, "skip"},
                                  std::pair{OnNan::go_on, "go-on"}};
};

template <>
struct Names<LearningRate::Scaling> {
  static constexpr auto what = "the scaling of the learning rate";
  static constexpr std::array all{std::pair{LearningRate::Scaling::none, "none"},
                                  std::pair{LearningRate::Scaling::sqrt, "sqrt"},
                                  std::pair{LearningRate::Scaling::linear, "linear"}};
};

template <>
struct Names<LearningRate::Schedule> {
  static constexpr auto what = "the schedule of the learning rate";
  static constexpr std::array all{std::pair{LearningRate::Schedule::constant, "constant"},
                                  std::pair{LearningRate::Schedule::step, "step"},
                                  std::pair{LearningRate::Schedule::cosine, "cosine"}};
};

template <Named Value>
std::string_view to_string(Value value) {
  return name_in(Names<Value>::all, value);
}

// Throws Error, which lists the names, for a text that is none.
template <Named Value>
Value value_from(std::string_view name) {
  return value_in(Names<Value>::all, name, Names<Value>::what);
}

}  // namespace lockstep

// Gives options as the texts that flags have and processes compare.
#pragma once

#include <lockstep/trainer/train_options.hpp>

#include "base/classic.hpp"
#include "base/number_text.hpp"
#include "option_names.hpp"

#include <charconv>
#include <optional>
#include <string>
#include <type_traits>

namespace lockstep {

template <class Items, class Text>
std::string comma_joined(const Items& items, Text&& text_of) {
  std::string all;
  for (const auto& item : items) all += (all.empty() ? "" : ",") + text_of(item);
  return all;
}

// Gives a text that no other value has.
template <class Value>
std::string option_text(const Value& value) {
  if constexpr (std::is_same_v<Value, std::string>) {
    return value;
  } else if constexpr (std::is_same_v<Value, std::filesystem::path>) {
    return value.string();
  } else if constexpr (std::is_same_v<Value, bool>) {
    return value ? "true" : "false";
  } else if constexpr (std::is_same_v<Value, std::optional<double>>) {
    return value ? number_text(*value) : "none";
  } else if constexpr (std::is_floating_point_v<Value>) {
    return number_text(value);
  } else if constexpr (std::is_integral_v<Value>) {
    return std::to_string(value);
  } else if constexpr (std::is_enum_v<Value> || std::is_same_v<Value, BalanceRule>) {
    return std::string(to_string(value));
  } else if constexpr (std::is_same_v<Value, std::chrono::seconds>) {
    return std::to_string(value.count());
  } else if constexpr (std::is_same_v<Value, std::vector<int>>) {
    return comma_joined(value, [](int number) { return std::to_string(number); });
  } else if constexpr (std::is_same_v<Value, Devices>) {
    return comma_joined(value, [](const c10::Device& device) { return device.str(); });
  } else {
    static_assert(std::is_same_v<Value, std::optional<ModelSplit>>);
    return value ? to_string(*value) : "none";
  }
}

// Does the reverse, for a text that belongs to the option. A split has no text. Throws Error for an unknown name or
// device. Give valid numbers.
template <class Value>
void take_text(const std::string& text, Value& value) {
  if constexpr (std::is_same_v<Value, std::string> || std::is_same_v<Value, std::filesystem::path>) {
    value = text;
  } else if constexpr (std::is_same_v<Value, bool>) {
    value = text == "true";
  } else if constexpr (std::is_same_v<Value, std::optional<double>>) {
    take_text(text, value.emplace());
  } else if constexpr (std::is_arithmetic_v<Value>) {
    std::from_chars(text.data(), text.data() + text.size(), value);
  } else if constexpr (Named<Value>) {
    value = value_from<Value>(text);
  } else if constexpr (std::is_same_v<Value, OptimizerKind>) {
    value = optimizer_from(text);
  } else if constexpr (std::is_same_v<Value, BalanceRule>) {
    value = balance_rule_from(text);
  } else if constexpr (std::is_same_v<Value, std::chrono::seconds>) {
    value = std::chrono::seconds(std::stoll(text));
  } else if constexpr (std::is_same_v<Value, std::vector<int>>) {
    value.clear();
    Classic<std::istringstream> items(text);
    for (std::string item; std::getline(items, item, ',');) value.push_back(std::stoi(item));
  } else if constexpr (std::is_same_v<Value, Devices>) {
    value = parse_devices(text);
  }
}

}  // namespace lockstep

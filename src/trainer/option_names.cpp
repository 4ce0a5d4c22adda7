#include <lockstep/base/error.hpp>
#include <lockstep/trainer/train_options.hpp>

#include "base/names.hpp"
#include "base/number_text.hpp"

#include <array>
#include <charconv>
#include <utility>

namespace lockstep {
namespace {

constexpr std::array data_sources{std::pair{DataSource::fashion_mnist, "fashion-mnist"},
                                  std::pair{DataSource::synthetic, "synthetic"}};
constexpr std::array precisions{std::pair{Precision::float32, "float32"}, std::pair{Precision::tf32, "tf32"},
                                std::pair{Precision::bf16, "bf16"}};
constexpr std::array memory_formats{std::pair{MemoryFormat::contiguous, "contiguous"},
                                    std::pair{MemoryFormat::channels_last, "channels-last"}};
constexpr std::array compressions{std::pair{Compression::none, "none"}, std::pair{Compression::bf16, "bf16"},
                                  std::pair{Compression::fp16, "fp16"}, std::pair{Compression::powersgd, "powersgd"}};
constexpr std::array on_nans{std::pair{OnNan::stop, "stop"}, std::pair{OnNan::skip, "skip"},
                             std::pair{OnNan::go_on, "go-on"}};

}  // namespace

std::string_view to_string(DataSource data) {
  return name_in(data_sources, data);
}

std::string_view to_string(Precision precision) {
  return name_in(precisions, precision);
}

std::string_view to_string(MemoryFormat format) {
  return name_in(memory_formats, format);
}

std::string_view to_string(Compression compression) {
  return name_in(compressions, compression);
}

std::string_view to_string(OnNan on_nan) {
  return name_in(on_nans, on_nan);
}

DataSource data_source_from(std::string_view name) {
  return value_in(data_sources, name, "the data set");
}

Precision precision_from(std::string_view name) {
  return value_in(precisions, name, "the precision");
}

MemoryFormat memory_format_from(std::string_view name) {
  return value_in(memory_formats, name, "the memory format");
}

Compression compression_from(std::string_view name) {
  return value_in(compressions, name, "the compression of gradients");
}

OnNan on_nan_from(std::string_view name) {
  return value_in(on_nans, name, "what becomes of a step that is not finite");
}

std::string to_string(const BalanceRule& sizes) {
  if (std::holds_alternative<EqualParts>(sizes)) return "equal";
  if (std::holds_alternative<PartsBySpeed>(sizes)) return "auto";
  std::string text;
  for (const double share : std::get<std::vector<double>>(sizes))
    text += (text.empty() ? "" : ",") + number_text(share);
  return text;
}

BalanceRule balance_rule_from(const std::string& text) {
  if (text == "equal") return EqualParts();
  if (text == "auto") return PartsBySpeed();
  std::vector<double> shares;
  const char* const end = text.data() + text.size();
  for (const char* next = text.data();; ++next) {
    const auto [rest, error] = std::from_chars(next, end, shares.emplace_back());
    if (error != std::errc() || (rest != end && *rest != ',')) break;
    if (rest == end) return shares;
    next = rest;
  }
  throw Error("the balance is \"" + text + "\"; it must be equal, auto, or a share for each device, as in 2,1");
}

}  // namespace lockstep

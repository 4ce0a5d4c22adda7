// TrainOptions as JSON: a run's config.json.
#include <lockstep/base/error.hpp>
#include <nlohmann/json.hpp>

#include "io/json_fields.hpp"
#include "layout/split_json.hpp"
#include "option_table.hpp"
#include "option_text.hpp"
#include "train_options.hpp"

#include <algorithm>
#include <array>
#include <optional>
#include <string_view>
#include <system_error>
#include <type_traits>
#include <vector>

namespace lockstep {
namespace {

using nlohmann::json;

template <class Value>
nlohmann::ordered_json json_of(const Value& value) {
  if constexpr (std::is_same_v<Value, std::optional<ModelSplit>>) {
    return to_json(*value);
  } else if constexpr (std::is_same_v<Value, std::optional<double>>) {
    return *value;
  } else if constexpr (std::is_arithmetic_v<Value> || std::is_same_v<Value, std::vector<int>>) {
    return value;
  } else {
    return option_text(value);
  }
}

template <class Value>
bool is_absent(const Value&) {
  return false;
}
template <class Value>
bool is_absent(const std::optional<Value>& value) {
  return !value.has_value();
}

template <class Value>
void read(JsonFields& fields, const char* key, Value& value) {
  if constexpr (std::is_same_v<Value, std::optional<ModelSplit>>) {
    auto split = fields.object(key);
    value = split_from(split);
    split.no_more();
  } else if constexpr (std::is_same_v<Value, std::vector<int>>) {
    value = fields.list<int>(key);
  } else if constexpr (std::is_same_v<Value, std::optional<double>>) {
    value = fields.required<double>(key);
  } else if constexpr (std::is_arithmetic_v<Value>) {
    value = fields.required<Value>(key);
  } else {
    value = fields.named(key, [&](const std::string& text) {
      Value named = value;
      take_text(text, named);
      return named;
    });
  }
}

// The ways in their order, with the keys that each has in config.json.
struct WrittenWay {
  std::string_view kind;
  std::vector<std::string_view> keys;
  bool has(std::string_view key) const { return std::find(keys.begin(), keys.end(), key) != keys.end(); }
};
const std::array<WrittenWay, std::variant_size_v<Way>> ways = {
    {{"averaged", {"compress"}},
     {"powersgd", {"compress_rank"}},
     {"zero", {"zero_stage"}},
     {"local_sgd", {"sync_every", "outer_lr", "outer_momentum"}},
     {"split", {"split", "compress"}},
     {"cuda_graph", {}}}};

const WrittenWay& way_called(std::string_view kind) {
  std::string kinds;
  for (const WrittenWay& way : ways) {
    if (way.kind == kind) return way;
    kinds += (kinds.empty() ? "" : ", ") + std::string(way.kind);
  }
  throw Error("there is no way \"" + std::string(kind) + "\"; there are " + kinds);
}

bool is_of_a_way(std::string_view key) {
  return key == "cuda_graph" || std::any_of(ways.begin(), ways.end(), [&](auto& way) { return way.has(key); });
}

}  // namespace

std::string to_json(const TrainOptions& options) {
  nlohmann::ordered_json config;
  const FlatWay flat_way = flat(options.way);
  const WrittenWay& way = ways[way_of(flat_way).index()];
  nlohmann::ordered_json of_way = {{"kind", way.kind}};
  each_option(options, flat_way, [&](const Option& option, const auto& value) {
    if (!option.more.kept || is_absent(value) || !says_something(option, options)) return;
    if (!is_of_a_way(option.key)) config[option.key] = json_of(value);
    if (way.has(option.key)) of_way[option.key] = json_of(value);
  });
  config["way"] = of_way;
  try {
    return config.dump(2) + "\n";
  } catch (const json::exception&) {  // all else is numbers and names
    throw Error("configuration: a path is not UTF-8, so that it cannot be kept: data_dir is '" +
                options.data.folder.string() + "', run_dir is '" + options.keep.run_dir.string() + "'");
  }
}

TrainOptions train_options_from_json(const std::string& text, const Devices& devices) {
  auto fields = JsonFields::parse(text, "configuration");
  TrainOptions options;
  FlatWay flat_way;
  std::optional<JsonFields> of_way;  // none: 0.1 wrote these keys beside the others, those of all ways
  const WrittenWay* way = nullptr;
  if (fields.has("way")) {
    of_way = fields.object("way");
    way = of_way->named("kind", [](const std::string& kind) { return &way_called(kind); });
    if (way->kind == "powersgd") flat_way.compress = Compression::powersgd;
    flat_way.cuda_graph = way->kind == "cuda_graph";
  }
  each_option(options, flat_way, [&](const Option& option, auto& value) {
    const bool is_in_way = way != nullptr && is_of_a_way(option.key);
    JsonFields& from = is_in_way ? *of_way : fields;
    if (!option.more.kept || (is_in_way && !way->has(option.key)) || !from.has(option.key)) return;
    if constexpr (std::is_same_v<std::decay_t<decltype(value)>, Devices>) {
      if (from.required<std::string>(option.key).empty() || !devices.empty()) return;
    }
    read(from, option.key, value);
  });
  if (of_way) of_way->no_more();
  fields.no_more();
  options.way = way_of(flat_way);
  if (way != nullptr && way != &ways[options.way.index()]) {
    of_way->refuse("kind", std::string(ways[options.way.index()].kind) + ", by the keys beside it");
  }
  if (!devices.empty()) options.devices = devices;
  return options;
}

TrainOptions read_config(const std::filesystem::path& run_dir, const Devices& devices) {
  const auto file = run_dir / kConfigFile;
  std::error_code unknown;
  if (!std::filesystem::exists(file, unknown) && !unknown) {
    throw Error(run_dir.string() + " is not the folder of a run: there is no " + kConfigFile +
                " in it. `lockstep train` makes one");
  }
  return read_json(file, [&](const std::string& text) { return train_options_from_json(text, devices); });
}

}  // namespace lockstep

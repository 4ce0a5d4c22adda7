// Writes and reads TrainOptions as JSON: a run's config.json.
#include <lockstep/base/error.hpp>
#include <nlohmann/json.hpp>

#include "io/json_fields.hpp"
#include "layout/split_json.hpp"
#include "option_table.hpp"
#include "option_text.hpp"
#include "train_options.hpp"

#include <map>
#include <optional>
#include <string_view>
#include <system_error>
#include <type_traits>

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

}  // namespace

std::string to_json(const TrainOptions& options) {
  const TrainOptions defaults;
  std::map<std::string_view, std::string> unset;
  each_option(defaults, [&](const Option& option, const auto& value) { unset[option.key] = option_text(value); });
  nlohmann::ordered_json config, way = json::object();
  each_option(options, [&](const Option& option, const auto& value) {
    if (!option.more.kept || !says_something(option, options)) return;
    if constexpr (requires { value.has_value(); }) {
      if (!value.has_value()) return;
    }
    if (!option.is_of_way) config[option.key] = json_of(value);
    if (option.is_of_way && option_text(value) != unset[option.key]) way[option.key] = json_of(value);
  });
  config["way"] = way;
  try {
    return config.dump(2) + "\n";
  } catch (const json::exception&) {  // all other values are numbers and names
    throw Error("configuration: a path is not UTF-8, so that it cannot be kept: data_dir is '" +
                flat(options).data_dir.string() + "', run_dir is '" + options.keep.run_dir.string() + "'");
  }
}

TrainOptions train_options_from_json(const std::string& text, const Devices& devices) {
  auto fields = JsonFields::parse(text, "configuration");
  std::optional<JsonFields> way;  // the way; none: 0.1 had the options of all ways beside the others
  if (fields.has("way")) way = fields.object("way");
  TrainOptions options;
  each_option(options, [&](const Option& option, auto& value) {
    JsonFields& from = option.is_of_way && way ? *way : fields;
    if (!option.more.kept || !from.has(option.key)) return;
    if constexpr (std::is_same_v<std::decay_t<decltype(value)>, Devices>) {
      if (from.required<std::string>(option.key).empty() || !devices.empty()) return;
    }
    read(from, option.key, value);
  });
  // 0.1 had these keys. The first has no meaning any more.
  fields.has("write_text");
  if (fields.has("keep_twice") && fields.required<bool>("keep_twice")) {
    throw Error(
        "configuration: `keep_twice` of lockstep 0.1 is gone. Remove the key, and start the job by `lockstep launch` "
        "with `resume` auto: it starts again when a process is lost",
        {.options = {"keep_twice"}});
  }
  if (way) way->no_more();
  fields.no_more();
  if (!devices.empty()) options.devices = devices;
  return options;
}

TrainOptions read_config(const std::filesystem::path& run_dir, const Devices& devices) {
  const auto file = run_dir / kConfigFile;
  std::error_code unknown;
  if (!std::filesystem::exists(file, unknown) && !unknown) {
    throw Error(run_dir.string() + " is not the folder of a run: there is no " + kConfigFile +
                    " in it. `lockstep train` makes one",
                {Error::file, {}, {"run_dir"}});
  }
  return read_json(file, [&](const std::string& text) { return train_options_from_json(text, devices); });
}

}  // namespace lockstep

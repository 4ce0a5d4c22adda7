// JsonFields: reads an object of a JSON file key by key, and refuses keys that nobody asked for.
//
// A value is taken as it is, or refused. It is never rounded, cut or converted. Every Error names the key, with the
// path from the top of the file ("plan: mesh.data").
#pragma once

#include <lockstep/base/error.hpp>
#include <nlohmann/json.hpp>

#include <cstdint>
#include <filesystem>
#include <limits>
#include <set>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "not_json.hpp"
#include "read_text.hpp"

namespace lockstep {

// Returns "" if `found` is a Value as it stands, and otherwise the kind that is needed. (json itself would make 2 of
// 2.7.)
template <class Value>
std::string what_lacks(const nlohmann::json& found) {
  if constexpr (std::is_same_v<Value, std::string>) {
    return found.is_string() ? "" : "a text";
  } else if constexpr (std::is_same_v<Value, bool>) {
    return found.is_boolean() ? "" : "true or false";
  } else if constexpr (std::is_floating_point_v<Value>) {
    return found.is_number() ? "" : "a number";
  } else {
    const bool fits = found.is_number_unsigned()  ? std::in_range<Value>(found.get<uint64_t>())
                      : found.is_number_integer() ? std::in_range<Value>(found.get<int64_t>())
                                                  : false;
    return fits ? ""
                : std::string("a whole number ") + (std::is_unsigned_v<Value> ? "from 0 " : "") + "up to " +
                      std::to_string(std::numeric_limits<Value>::max());
  }
}

class JsonFields {
 public:
  // Parses the file's text. Every Error begins with `what` ("plan").
  static JsonFields parse(std::string_view text, const std::string& what) {
    try {
      return JsonFields(nlohmann::json::parse(text), what + ": ", "");
    } catch (const nlohmann::json::exception& error) {
      throw Error(what + ": this is not JSON: " + io::where_not_json(text, error));
    }
  }

  bool has(const std::string& key) {
    asked_.insert(key);
    return object_.contains(key);
  }

  template <class Value>
  Value required(const std::string& key) {
    return as<Value>(at(key), key);
  }

  template <class Value>
  Value optional(const std::string& key, Value otherwise) {
    return has(key) ? as<Value>(at(key), key) : otherwise;
  }

  // Reads a name and returns from(name). If `from` throws Error, its text says what is wrong with the name.
  template <class From>
  auto named(const std::string& key, From&& from) {
    const auto name = required<std::string>(key);
    try {
      return from(name);
    } catch (const Error& error) {
      throw Error(what_ + "the value of \"" + path_ + key + "\": " + error.what(), {.options = {path_ + key}});
    }
  }

  template <class Value>
  std::vector<Value> list(const std::string& key) {
    std::vector<Value> values;
    for (const auto& item : items(key))
      values.push_back(as<Value>(item, key + "[" + std::to_string(values.size()) + "]"));
    return values;
  }

  JsonFields object(const std::string& key) { return JsonFields(at(key), what_, path_ + key); }

  std::vector<JsonFields> objects(const std::string& key) {
    std::vector<JsonFields> objects;
    for (const auto& item : items(key)) {
      objects.push_back(JsonFields(item, what_, path_ + key + "[" + std::to_string(objects.size()) + "]"));
    }
    return objects;
  }

  // Throws Error if there is a key that was not asked for.
  void no_more() const {
    for (const auto& [key, value] : object_.items()) {
      if (asked_.count(key) == 0)
        throw Error(what_ + "unknown key \"" + path_ + key + "\"", {.options = {path_ + key}});
    }
  }

  // Refuses a value that has the right type but makes no sense.
  [[noreturn]] void refuse(const std::string& key, const std::string& rule) { refuse(key, object_.at(key), rule); }

 private:
  JsonFields(nlohmann::json object, std::string what, const std::string& path)
      : object_(std::move(object)), what_(std::move(what)), path_(path.empty() ? "" : path + ".") {
    if (object_.is_object()) return;
    throw Error(what_ + (path.empty() ? "" : "the value of \"" + path + "\": ") + "expected a JSON object, got " +
                    object_.dump(),
                path.empty() ? Error::Data() : Error::Data{.options = {path}});
  }

  const nlohmann::json& at(const std::string& key) {
    if (!has(key)) throw Error(what_ + "the key \"" + path_ + key + "\" is missing", {.options = {path_ + key}});
    return object_.at(key);
  }

  const nlohmann::json& items(const std::string& key) {
    const auto& found = at(key);
    if (!found.is_array()) refuse(key, "a list");
    return found;
  }

  template <class Value>
  Value as(const nlohmann::json& found, const std::string& key) const {
    if (const auto needed = what_lacks<Value>(found); !needed.empty()) refuse(key, found, needed);
    return found.get<Value>();
  }

  [[noreturn]] void refuse(const std::string& key, const nlohmann::json& found, const std::string& rule) const {
    throw Error(what_ + "the value of \"" + path_ + key + "\" cannot be " + found.dump() + "; it must be " + rule,
                {.options = {path_ + key}});
  }

  nlohmann::json object_;
  std::string what_;  // "plan: "
  std::string path_;  // "" or "mesh."
  std::set<std::string> asked_;
};

// Parses the file's text with `parse`. Errors name the file.
template <class Parse>
auto read_json(const std::filesystem::path& file, Parse&& parse) {
  const std::string text = io::read_text(file);
  try {
    return parse(text);
  } catch (const Error& error) {
    throw Error(file.string() + ": " + error.what(), {Error::file, {}, error.options()});
  }
}

}  // namespace lockstep

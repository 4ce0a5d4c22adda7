// What other processes have left in the store, read strictly: a stranger can write there too.
#pragma once

#include <lockstep/error.hpp>

#include <cctype>
#include <exception>
#include <string>

namespace lockstep::comm {

// A key of the run holds what none of its processes can have written. The store itself is there.
class ForeignValue : public Error {
 public:
  ForeignValue(const std::string& key, const std::string& value)
      : Error("the store holds " + shown(value) + " under " + key +
              ", which no process of this run can have written. Another program uses the job's store: start the job "
              "anew, with a MASTER_PORT of its own") {}

 private:
  static std::string shown(const std::string& value) {
    constexpr size_t longest = 60;
    if (value.empty()) return "nothing";
    std::string text = value.substr(0, longest);
    for (char& c : text) {
      if (std::isprint(static_cast<unsigned char>(c)) == 0) c = '?';
    }
    return '"' + text + (value.size() > longest ? "\" ..." : "\"");
  }
};

// parse(value), whatever it throws being a ForeignValue.
template <class Parse>
auto parse_stored(const std::string& key, const std::string& value, Parse&& parse) {
  try {
    return parse(value);
  } catch (const std::exception&) {
    throw ForeignValue(key, value);
  }
}

}  // namespace lockstep::comm

// Reads values that other processes have left in the store, strictly: a stranger can write there too.
#pragma once

#include <lockstep/base/error.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <cctype>
#include <charconv>
#include <cstdint>
#include <exception>
#include <string>
#include <system_error>

namespace lockstep::comm {

// Says that a key of the run holds a value that none of its processes can have written. The store itself is there.
class ForeignValue : public Error {
 public:
  ForeignValue(const std::string& key, const std::string& value)
      : Error(
            "the store holds " + shown(value) + " under " + key +
                ", which no process of this run can have written. Another program uses the job's store: start the job "
                "anew, with a MASTER_PORT of its own",
            {Error::machine}) {}

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

// Gives parse(value), or throws ForeignValue if parse throws.
template <class Parse>
auto parse_stored(const std::string& key, const std::string& value, Parse&& parse) {
  try {
    return parse(value);
  } catch (const std::exception&) {
    throw ForeignValue(key, value);
  }
}

// Throws if the text is not a number alone.
inline int64_t number_in(const std::string& text) {
  int64_t number = 0;
  const char* const end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, number);
  if (error != std::errc() || rest != end) throw Error("no number");
  return number;
}

// Gives a count that several processes add to, or 0 if nobody has. Throws ForeignValue if it is no count.
inline int64_t stored_count(c10d::Store& store, const std::string& key) {
  if (!store.check({key})) return 0;
  return parse_stored(key, store.get_to_str(key), [](const std::string& text) {
    const int64_t count = number_in(text);
    if (count < 0) throw Error("no count");
    return count;
  });
}

// Gives the count afterwards. It reads the count first, since torchrun's store hangs up on a client that adds to what
// is no number.
inline int64_t add_to_count(c10d::Store& store, const std::string& key, int64_t number) {
  stored_count(store, key);
  return store.add(key, number);
}

}  // namespace lockstep::comm

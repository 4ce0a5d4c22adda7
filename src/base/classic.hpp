// Makes text that is the same under every locale. A program may set a global locale that writes 4096 as "4,096" or 0.5
// as "0,5", and a plain stream follows it. Digests, and texts that ranks compare, must not do so.
#pragma once

#include <locale>
#include <sstream>
#include <string>
#include <utility>

namespace lockstep {

// Makes a stream of the standard library write and read numbers as the classic locale does.
template <class Stream>
class Classic : public Stream {
 public:
  template <class... Arguments>
  explicit Classic(Arguments&&... arguments) : Stream(std::forward<Arguments>(arguments)...) {
    this->imbue(std::locale::classic());
  }
};

// Joins the values' texts.
template <class... Values>
std::string classic_text(const Values&... values) {
  Classic<std::ostringstream> text;
  (text << ... << values);
  return text.str();
}

}  // namespace lockstep

// Text that is the same under every locale. A program may set a global locale that writes 4096 as "4,096" or 0.5 as
// "0,5", and a plain stream follows it. But digests, and texts that ranks compare, must not depend on it.
#pragma once

#include <locale>
#include <sstream>
#include <string>
#include <utility>

namespace lockstep {

// A stream of the standard library that writes and reads numbers as the classic locale does.
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

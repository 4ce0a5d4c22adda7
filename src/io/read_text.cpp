#include "read_text.hpp"

#include <lockstep/base/error.hpp>

#include <cerrno>
#include <fstream>

#include "base/classic.hpp"
#include "reason.hpp"

namespace lockstep::io {

std::string read_text(const std::filesystem::path& file) {
  Classic<std::ostringstream> text;
  errno = 0;
  std::ifstream stream(file);
  // A folder can be opened, but not read. An empty file gives no text, and no error either.
  if (!stream || (!(text << stream.rdbuf()) && errno != 0)) {
    throw Error("cannot read " + file.string() + ": " + reason(errno), {Error::file});
  }
  return text.str();
}

}  // namespace lockstep::io

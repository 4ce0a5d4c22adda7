#include "terminal.hpp"

#include <langinfo.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <clocale>
#include <cstdlib>
#include <string_view>

namespace lockstep::cli {

bool is_terminal(int fd) {
  return isatty(fd) == 1;
}

bool can_redraw(int fd) {
  const char* const kind = std::getenv("TERM");
  const bool somebody_is_there = is_terminal(STDIN_FILENO) || is_terminal(STDERR_FILENO);
  return is_terminal(fd) && somebody_is_there && kind != nullptr && std::string_view(kind) != "dumb";
}

int terminal_width(int fd) {
  winsize size{};
  return ioctl(fd, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

bool locale_is_utf8() {
  // Makes a locale object of its own, since setlocale() would change how the whole process reads and writes.
  const locale_t locale = newlocale(LC_CTYPE_MASK, "", nullptr);
  if (locale == nullptr) return false;  // the environment names a locale that is not installed
  const bool utf8 = std::string_view(nl_langinfo_l(CODESET, locale)) == "UTF-8";
  freelocale(locale);
  return utf8;
}

}  // namespace lockstep::cli

#include "stop_signals.hpp"

#include <unistd.h>

#include <csignal>
#include <string_view>

namespace lockstep::cli {

namespace {

// Never waits, since a stop must not depend on a reader.
void print_error(std::string_view text) {
  Output error(STDERR_FILENO);
  error.print(text);
  error.give_up();
}

}  // namespace

StopOnSignals::Told says_that_it_stops(bool quiet) {
  return [quiet](int signal, int number) {
    if (number > 1) {
      print_error("\n");
      _exit(128 + signal);  // ends without destructors: threads may hang, and files are whole at any moment
    }
    if (quiet) return;
    print_error(signal == SIGINT   ? "\nstopping (Ctrl-C again ends at once)\n"
                : signal == SIGHUP ? "\nSIGHUP: stopping (a second signal ends at once)\n"
                                   : "\nSIGTERM: stopping (a second signal ends at once)\n");
  };
}

}  // namespace lockstep::cli

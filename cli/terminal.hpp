// Says what the terminal at the other end of a file descriptor can do.
#pragma once

namespace lockstep::cli {

// True for a terminal; false for a file or a pipe.
bool is_terminal(int fd);

// True if the terminal can redraw a line in place: TERM is set, and not to "dumb". False if the output is a terminal
// and neither input nor errors are: then mpirun has made it, and copies it line by line to an unknown place.
bool can_redraw(int fd);

// Columns of the terminal as it is now (a user may resize it at any time); 80 if it does not say.
int terminal_width(int fd);

// True if the user's locale writes UTF-8.
bool locale_is_utf8();

}  // namespace lockstep::cli

// Says what the terminal at the other end of a file descriptor can do.
#pragma once

namespace lockstep::cli {

// Whether it is a terminal, and no file or pipe.
bool is_terminal(int fd);

// Whether the terminal can redraw a line in place: TERM is set, and not to "dumb". It cannot if the output is a
// terminal and neither input nor errors are: then mpirun has made it, and copies it line by line to an unknown place.
bool can_redraw(int fd);

// Gives the columns of the terminal as it is now (a user may resize it at any time); 80 if it does not say.
int terminal_width(int fd);

// Whether the user's locale writes UTF-8.
bool locale_is_utf8();

}  // namespace lockstep::cli

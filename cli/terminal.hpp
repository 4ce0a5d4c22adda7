// Asks about the terminal at the other end of a file descriptor.
#pragma once

namespace lockstep::cli {

// Tells whether it is a terminal, and no file or pipe.
bool is_terminal(int fd);

// Tells whether the terminal can redraw a line in place: TERM is set, and not to "dumb". It cannot if only the output
// is a terminal: then mpirun has made that one, and copies it line by line to an unknown place.
bool can_redraw(int fd);

// Gives the columns of the terminal now (a user may resize it at any time); 80 if the terminal does not say.
int terminal_width(int fd);

// Tells whether the user's locale writes UTF-8.
bool locale_is_utf8();

}  // namespace lockstep::cli

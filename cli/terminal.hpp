// What the terminal at the other end of a file descriptor can do.
#pragma once

namespace lockstep::cli {

// True for a terminal; false for a file or a pipe.
bool is_terminal(int fd);

// True if the terminal can redraw a line in place: TERM is set, and not to "dumb". An output that is a terminal while
// neither the input nor the errors have one is mpirun's, which copies it line by line to who knows where.
bool can_redraw(int fd);

// Columns of the terminal as it is now (a user may resize it at any time); 80 if it does not say.
int terminal_width(int fd);

// True if the user's locale writes UTF-8.
bool locale_is_utf8();

}  // namespace lockstep::cli

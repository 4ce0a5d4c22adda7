// Makes text for the terminal: printf into a string, wrapped paragraphs, aligned tables.
#pragma once

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

namespace lockstep::cli {

[[gnu::format(printf, 1, 2)]] std::string format(const char* pattern, ...);

// Gives "1 run" or "2 runs".
std::string plural(size_t count, const char* noun);

std::string join(const std::vector<std::string>& words, const char* between = " ");

// Puts the words of `text` into lines of at most `width` columns, broken at blanks. A longer word has a line of its
// own. A line break in `text` stays.
std::vector<std::string> wrap(const std::string& text, size_t width);

// Gives one row per line, indented by two; the second columns are aligned.
using Rows = std::vector<std::pair<std::string, std::string>>;
std::string table(const Rows& rows);

// Gives rows of aligned cells, indented by two: the first column is aligned on the left, the others on the right.
std::string aligned(const std::vector<std::vector<std::string>>& rows);

// Leaves out the lines in which LibTorch's exceptions show their call stack.
std::string without_call_stacks(const std::string& text);

}  // namespace lockstep::cli

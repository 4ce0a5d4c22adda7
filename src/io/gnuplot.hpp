// Draws with gnuplot, in one style for all plots.
#pragma once

#include <filesystem>
#include <string>

namespace lockstep::io {

// As a gnuplot string in single quotes: control characters become blanks.
std::string gnuplot_string(const std::string& text);

// Replaces `file`, an SVG or a PNG by its extension, by what `script` plots. The size, the axes' lines and the grid are
// set already; the script says the rest. Throws Error that names the file: another extension, gnuplot missing (nested
// ProgramNotFound; the text says which package has it), failing or hanging (it gets 10 s); the file of before stays as
// it was.
void draw(const std::filesystem::path& file, const std::string& script);

}  // namespace lockstep::io

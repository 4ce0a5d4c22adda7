// Draws with gnuplot, in one style for all plots.
#pragma once

#include <filesystem>
#include <string>

namespace lockstep::io {

// As a gnuplot string in single quotes: control characters become blanks.
std::string gnuplot_string(const std::string& text);

// Replaces `file` by what `script` plots: an SVG or a PNG, by its extension. Size, axes and grid are set already; the
// script says the rest. Throws Error, which names the file, for another extension, and if gnuplot is missing (a nested
// ProgramNotFound; the text says which package has it), fails, or takes more than 10 s. The old file then stays as it
// was.
void draw(const std::filesystem::path& file, const std::string& script);

}  // namespace lockstep::io

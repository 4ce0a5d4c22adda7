// Draws with gnuplot, in one style for all plots.
#pragma once

#include <filesystem>
#include <string>

namespace lockstep::io {

// Writes a text as a gnuplot string in single quotes; control characters become blanks.
std::string gnuplot_string(const std::string& text);

// Replaces `file` by the plot of `script`: an SVG or a PNG, by its extension. Size, axes and grid are set already.
// Throws Error, which names the file, for another extension, and if gnuplot fails or takes more than 10 s. If gnuplot
// is missing, it throws ProgramNotFound, which says which package has gnuplot. After an Error the old
// file is as it was.
void draw(const std::filesystem::path& file, const std::string& script);

}  // namespace lockstep::io

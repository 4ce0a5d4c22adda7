#include "gnuplot.hpp"

#include <lockstep/base/error.hpp>

#include <chrono>
#include <exception>

#include "atomic_file.hpp"
#include "run_program.hpp"

namespace lockstep::io {
namespace {

const char* const plot_style = R"(
set border 3 linewidth 1 linecolor rgb '#888888'
set tics nomirror out scale 0.6 textcolor rgb '#333333'
set grid linetype 1 linewidth 0.6 linecolor rgb '#dddddd'
)";

std::string terminal_for(const std::filesystem::path& file) {
  if (file.extension() == ".svg") return "svg size 720,450 dynamic enhanced font 'sans-serif,13' background 'white'";
  if (file.extension() == ".png")
    return "pngcairo size 1440,900 fontscale 2 linewidth 2 pointscale 2 enhanced font 'sans-serif,10' background "
           "'white'";
  throw Error("cannot draw '" + file.string() + "': its extension must be .svg or .png");
}

}  // namespace

// Doubles the quotes: nothing else is special in single quotes.
std::string gnuplot_string(const std::string& text) {
  std::string result = "'";
  for (char c : text) {
    if (c == '\'') result += '\'';
    result += static_cast<unsigned char>(c) < ' ' ? ' ' : c;
  }
  return result + "'";
}

void draw(const std::filesystem::path& file, const std::string& script) {
  const std::string whole = "set terminal " + terminal_for(file) + plot_style + script;
  std::string image;
  try {
    image = run_program({"gnuplot", "--default-settings"}, whole, std::chrono::seconds(10));
  } catch (const ProgramNotFound& error) {
    throw ProgramNotFound("cannot draw '" + file.string() + "': " + error.what() +
                          " (gnuplot is Debian's package gnuplot-nox)");
  } catch (const Error& error) {
    throw Error("cannot draw '" + file.string() + "': " + error.what(), error.data());
  }
  if (image.empty()) throw Error("cannot draw '" + file.string() + "': gnuplot drew nothing", {Error::machine});
  write_file(file, image);
}

}  // namespace lockstep::io

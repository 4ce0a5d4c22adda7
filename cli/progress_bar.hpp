// The progress bar, with tqdm's habits: one line that is redrawn in place and goes away when the work is done.
//
//   epoch  3/10  45%|████▌     | 27136/60000 [00:08<00:10, 3204 samples/s, loss=0.512]
#pragma once

#include <cstdint>
#include <string>

#include "output.hpp"

namespace lockstep::cli {

enum class Unit { samples, bytes };

struct Progress {
  std::string label;
  int64_t done = 0;
  int64_t total = 0;  // the total; 0: it is not known
  double seconds = 0;
  Unit unit = Unit::samples;
  std::string note = {};  // a note such as "loss=0.512"
};

// Gives the line for a terminal of `width` columns. Three columns stay free, so that neither the last column nor a "^C"
// wraps. If it does not fit, first the bar becomes shorter, then the line's end is cut. With `utf8` the bar has block
// characters, otherwise '#'.
std::string progress_line(const Progress& progress, int width, bool utf8);

// LiveLine is the bottom line of the terminal. It shows the progress until other text is printed, which stays.
class LiveLine {
 public:
  // Shows nothing if `enabled` is false, as when the output is no terminal.
  LiveLine(Output& output, bool enabled);
  ~LiveLine() { clear(); }
  LiveLine(const LiveLine&) = delete;
  LiveLine& operator=(const LiveLine&) = delete;

  void show(const std::string& text);  // shows one line of plain ASCII
  void show(const Progress& progress);
  void clear();

 private:
  void draw(const std::string& line);

  Output& output_;
  bool enabled_;
  bool utf8_;
  bool shown_ = false;
};

}  // namespace lockstep::cli

#include "progress_bar.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "terminal.hpp"
#include "text.hpp"

namespace lockstep::cli {

namespace {

constexpr int narrowest_bar = 4;  // the fewest columns of a bar; with less room the numbers alone say more
constexpr int widest_bar = 40;
constexpr int spare = 3;  // columns at the right end: the last one, where terminals wrap, and the "^C" that they print

// Gives "08:05" or "1:08:05"; "?" for a time that nobody knows yet.
std::string clock(double seconds) {
  if (!std::isfinite(seconds) || seconds > 1e9) return "?";
  const auto whole = static_cast<int64_t>(std::max(seconds, 0.0));
  const auto hours = static_cast<long long>(whole / 3600);
  const auto minutes = static_cast<long long>(whole / 60 % 60);
  const auto rest = static_cast<long long>(whole % 60);
  return hours > 0 ? format("%lld:%02lld:%02lld", hours, minutes, rest) : format("%02lld:%02lld", minutes, rest);
}

std::string amount(int64_t count, Unit unit) {
  return unit == Unit::bytes ? format("%.1fMB", static_cast<double>(count) / 1e6) : std::to_string(count);
}

std::string rate_text(double rate, Unit unit) {
  if (!std::isfinite(rate)) return unit == Unit::bytes ? "? MB/s" : "? samples/s";
  return unit == Unit::bytes ? format("%.1f MB/s", rate / 1e6) : format("%.0f samples/s", rate);
}

// Gives a bar of `columns` with `fraction` of it filled. UTF-8 has blocks of an eighth.
std::string bar(double fraction, int columns, bool utf8) {
  static const char* const eighths[] = {"", "▏", "▎", "▍", "▌", "▋", "▊", "▉"};
  const int steps = utf8 ? 8 : 1;
  const int filled = static_cast<int>(fraction * columns * steps);
  const int whole = filled / steps;
  const std::string part = utf8 ? eighths[filled % steps] : "";
  std::string text;
  for (int i = 0; i < whole; ++i) text += utf8 ? "█" : "#";
  text += part;
  return text + std::string(columns - whole - (part.empty() ? 0 : 1), ' ');
}

}  // namespace

std::string progress_line(const Progress& progress, int width, bool utf8) {
  const bool has_total = progress.total > 0;
  const double fraction =
      has_total ? std::clamp(static_cast<double>(progress.done) / static_cast<double>(progress.total), 0.0, 1.0) : 0;
  const double rate = static_cast<double>(progress.done) / progress.seconds;  // a rate that is not finite at first
  const double left = static_cast<double>(progress.total - progress.done) / rate;

  std::string head = progress.label;
  std::string tail = " " + amount(progress.done, progress.unit);
  if (has_total) {
    head += format(" %3d%%", static_cast<int>(fraction * 100));
    tail += "/" + amount(progress.total, progress.unit);
  }
  tail += " [" + clock(progress.seconds) + (has_total ? "<" + clock(left) : "") + ", " + rate_text(rate, progress.unit);
  tail += (progress.note.empty() ? "" : ", " + progress.note) + "]";

  const int room = width - spare - static_cast<int>(head.size() + tail.size()) - 2;  // the bar's own ends take 2
  if (has_total && room >= narrowest_bar) {
    return head + "|" + bar(fraction, std::min(room, widest_bar), utf8) + "|" + tail;
  }
  return (head + tail).substr(0, static_cast<size_t>(std::max(width - spare, 0)));
}

LiveLine::LiveLine(Output& output, bool enabled)
    : output_(output), enabled_(enabled), utf8_(enabled && locale_is_utf8()) {}

void LiveLine::show(const std::string& text) {
  if (!enabled_) return;
  draw(text.substr(0, static_cast<size_t>(std::max(terminal_width(output_.fd()) - spare, 0))));
}

void LiveLine::show(const Progress& progress) {
  if (!enabled_) return;
  draw(progress_line(progress, terminal_width(output_.fd()), utf8_));
}

void LiveLine::draw(const std::string& line) {
  output_.print("");                      // late text goes first
  if (output_.is_behind()) return;        // the next line will say more
  output_.print("\r" + line + "\033[K");  // the escape clears the rest of a longer line
  shown_ = true;
}

void LiveLine::clear() {
  if (!shown_) return;
  output_.print("\r\033[K");
  shown_ = false;
}

}  // namespace lockstep::cli

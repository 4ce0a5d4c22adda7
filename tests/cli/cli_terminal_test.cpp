// Labels: program
// The program in a terminal: the bar is redrawn in place, stays within the width, and leaves only the lines.
#include <algorithm>
#include <numeric>

#include "cli_fixture.hpp"

namespace cli_terminal_test {

using lockstep::Cli;
using lockstep::Finished;
using lockstep::Program;
using lockstep::run_program;
using testing::AllOf;
using testing::ContainsRegex;
using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;

// A terminal that knows what the program uses: \n, \r and "clear to the end of the line".
class Screen {
 public:
  explicit Screen(const std::string& text) {
    for (size_t i = 0; i < text.size(); ++i) {
      if (text[i] == '\r') {
        if (column_ > 0 && text[i + 1] != '\n') frames.push_back(cells_);
        column_ = 0;
      } else if (text[i] == '\n') {
        lines.push_back(joined(cells_));
        cells_.clear();
      } else if (text.compare(i, 3, "\033[K") == 0) {
        cells_.resize(column_);
        i += 2;
      } else if ((text[i] & 0xc0) == 0x80) {
        cells_.at(column_ - 1) += text[i];  // the rest of a UTF-8 character
      } else {
        cells_.resize(std::max(cells_.size(), column_ + 1), " ");
        cells_[column_++] = text[i];
      }
    }
    lines.push_back(joined(cells_));
  }

  using Cells = std::vector<std::string>;  // one character each
  static std::string joined(const Cells& cells) { return std::accumulate(cells.begin(), cells.end(), std::string()); }

  std::vector<std::string> lines;  // the lines that a user sees in the end
  std::vector<Cells> frames;       // every line as it was when the cursor went back

 private:
  Cells cells_;
  size_t column_ = 0;
};

class CliTerminal : public Cli {
 protected:
  Finished run(int columns, const std::string& locale, const std::vector<std::string>& more = {}) const {
    auto terminal = surroundings();
    terminal.terminal = true;
    terminal.columns = columns;
    terminal.environment = {"PATH=/usr/bin:/bin", "TERM=xterm", "LC_ALL=" + locale};
    return run_program(train(more), terminal);
  }
};

TEST_F(CliTerminal, DrawsABarPerEpochAndReplacesItByTheLine) {
  const Finished result = run(100, "C.UTF-8", {"--name", "bar"});
  ASSERT_EQ(result.code, 0) << result.out;
  const Screen screen(result.out);
  const auto is_full = [](const auto& frame) { return Screen::joined(frame).starts_with("epoch 2/2 100%|█"); };
  EXPECT_TRUE(std::any_of(screen.frames.begin(), screen.frames.end(), is_full)) << result.out;
  EXPECT_THAT(result.out,
              ContainsRegex("epoch 1/2 100%\\|(█)+\\| 300/300 \\[00:0[0-9]<00:00, [0-9]+ samples/s, loss=[0-9.]+\\]"));
  EXPECT_THAT(result.out, HasSubstr("loading the data"));

  ASSERT_EQ(screen.lines.size(), 22u) << result.out;
  EXPECT_THAT(screen.lines[0], StartsWith("lockstep "));
  EXPECT_THAT(screen.lines[15], StartsWith("epoch 1/2  train loss "));
  EXPECT_THAT(screen.lines[16], StartsWith("epoch 2/2  train loss "));
  EXPECT_EQ(screen.lines[17], "");
  EXPECT_THAT(screen.lines[19], StartsWith("weights "));
  EXPECT_THAT(screen.lines[20], StartsWith("test acc: "));
  EXPECT_EQ(screen.lines[21], "");  // the shell's prompt comes here
}

TEST_F(CliTerminal, FitsNarrowTerminals) {
  for (const size_t columns : {20, 40, 60}) {
    const Finished result = run(static_cast<int>(columns), "C.UTF-8");
    ASSERT_EQ(result.code, 0) << result.out;
    const Screen screen(result.out);
    EXPECT_FALSE(screen.frames.empty());
    for (const auto& frame : screen.frames) EXPECT_LE(frame.size(), columns - 3) << Screen::joined(frame);
  }
}

TEST_F(CliTerminal, FollowsTheTerminalsWidth) {
  auto terminal = surroundings();
  terminal.terminal = true;
  terminal.environment.push_back("TERM=xterm");
  terminal.columns = 60;
  Program program(train({"--epochs", "1000"}), terminal);
  ASSERT_TRUE(program.wait_for("epoch    2/1000  train loss"));
  program.resize(100);
  ASSERT_TRUE(program.wait_for("epoch    6/1000  train loss"));
  program.send(SIGTERM);
  const auto frames = Screen(program.finish().out).frames;
  EXPECT_LE(frames.front().size(), 57u);
  EXPECT_GT(
      std::max_element(frames.begin(), frames.end(), [](const auto& a, const auto& b) { return a.size() < b.size(); })
          ->size(),
      60u);
}

TEST_F(CliTerminal, DrawsInAsciiWhereTheLocaleIsNotUtf8) {
  const Finished result = run(100, "C");
  EXPECT_THAT(result.out, ContainsRegex("epoch 1/2 100%\\|#+\\| 300/300 "));
  EXPECT_TRUE(std::all_of(result.out.begin(), result.out.end(), [](unsigned char c) { return c < 128; }));
}

TEST_F(CliTerminal, PrintsLinesOnlyIfAsked) {
  for (const char* mode : {"lines", "none"}) {
    const Finished result = run(100, "C.UTF-8", {"--progress", mode});
    EXPECT_EQ(result.code, 0);
    EXPECT_THAT(result.out, AllOf(Not(HasSubstr("\033")), Not(HasSubstr("samples/s"))));
  }
}

TEST_F(CliTerminal, AnErrorLeavesNoBarBehind) {
  const Finished result = run(100, "C.UTF-8", {"--data-dir", "missing"});
  EXPECT_EQ(result.code, 1);
  const Screen screen(result.out);
  ASSERT_EQ(screen.lines.size(), 2u) << result.out;
  EXPECT_THAT(screen.lines[0], StartsWith("lockstep: error: "));
}

}  // namespace cli_terminal_test

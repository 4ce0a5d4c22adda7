// The program in a terminal: the bar is redrawn in place, stays within the width, and leaves only the lines.
#include "cli_fixture.hpp"

namespace {

using lockstep::Cli;
using lockstep::Finished;
using lockstep::run_program;
using testing::AllOf;
using testing::ContainsRegex;
using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;

size_t columns_of(const std::string& utf8) {
  return static_cast<size_t>(std::count_if(utf8.begin(), utf8.end(), [](char c) { return (c & 0xc0) != 0x80; }));
}

// A terminal that knows what the program uses: \n, \r and "clear to the end of the line". Fails on a line that is too
// long to be redrawn.
struct Screen {
  std::vector<std::string> lines = {""};  // what a user sees in the end
  std::vector<std::string> frames;        // every line as it was when \r overwrote it

  Screen(const std::string& text, size_t width) {
    bool at_start = true;
    for (size_t i = 0; i < text.size(); ++i) {
      std::string& line = lines.back();
      if (text[i] == '\r') {
        if (!line.empty() && text[i + 1] != '\n') {
          EXPECT_LT(columns_of(line), width) << line;
          frames.push_back(line);
        }
        at_start = true;
      } else if (text[i] == '\n') {
        lines.emplace_back();
      } else if (text.compare(i, 3, "\033[K") == 0) {
        if (at_start) line.clear();
        i += 2;
      } else {
        if (at_start) line.clear();  // each frame ends with the escape that clears what is left of the one before
        at_start = false;
        line += text[i];
      }
    }
  }
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
  const Screen screen(result.out, 100);
  size_t full_bars = 0;
  for (const auto& frame : screen.frames) full_bars += frame.find("epoch 2/2 100%|█") == 0;
  EXPECT_GE(full_bars, 1u) << result.out;
  EXPECT_THAT(result.out,
              ContainsRegex("epoch 1/2 100%\\|(█)+\\| 300/300 \\[00:0[0-9]<00:00, [0-9]+ samples/s, loss=[0-9.]+\\]"));
  EXPECT_THAT(result.out, HasSubstr("loading the data"));

  ASSERT_EQ(screen.lines.size(), 17u) << result.out;
  EXPECT_THAT(screen.lines[0], StartsWith("lockstep "));
  EXPECT_THAT(screen.lines[11], StartsWith("epoch 1/2  train loss "));
  EXPECT_THAT(screen.lines[12], StartsWith("epoch 2/2  train loss "));
  EXPECT_EQ(screen.lines[13], "");
  EXPECT_THAT(screen.lines[15], StartsWith("test acc: "));
  EXPECT_EQ(screen.lines[16], "");  // the shell's prompt comes here
}

TEST_F(CliTerminal, FitsNarrowTerminals) {
  for (const int columns : {20, 40, 60}) {
    const Finished result = run(columns, "C.UTF-8");
    ASSERT_EQ(result.code, 0) << result.out;
    EXPECT_FALSE(Screen(result.out, static_cast<size_t>(columns)).frames.empty());
  }
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
  const Screen screen(result.out, 100);
  ASSERT_EQ(screen.lines.size(), 2u) << result.out;
  EXPECT_THAT(screen.lines[0], StartsWith("lockstep: error: "));
}

}  // namespace

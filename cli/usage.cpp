#include "usage.hpp"

#include <lockstep/models/models.hpp>

#include <algorithm>
#include <numeric>
#include <utility>

#include "text.hpp"

namespace lockstep::cli {

namespace {

using Words = std::vector<std::string>;

// Gives the command that the user chose, or as many of its words as are known.
const CLI::App& chosen(const CLI::App& program) {
  const auto parsed = program.get_subcommands();
  return parsed.empty() ? program : chosen(*parsed.front());
}

// Counts how many letters must be inserted, removed or replaced to get from one word to the other (Levenshtein's
// distance).
size_t distance(const std::string& from, const std::string& to) {
  std::vector<size_t> row(to.size() + 1);
  std::iota(row.begin(), row.end(), 0);
  for (size_t i = 0; i < from.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i + 1);
    for (size_t j = 0; j < to.size(); ++j) {
      const size_t replaced = diagonal + (from[i] == to[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({replaced, row[j] + 1, diagonal + 1});
    }
  }
  return row.back();
}

std::string did_you_mean(const std::string& word, const Words& known) {
  const auto rank = [&](const std::string& other) {
    return other.starts_with(word) ? 0 : distance(word, other);  // people shorten words
  };
  const auto best =
      std::min_element(known.begin(), known.end(), [&](const auto& a, const auto& b) { return rank(a) < rank(b); });
  if (best == known.end() || rank(*best) > std::max<size_t>(2, word.size() / 4)) return "";
  return "; did you mean " + *best + "?";
}

Words flags_of(const CLI::App& app) {
  Words names;
  for (const auto* option : app.get_options()) {
    for (const auto& name : option->get_lnames()) names.push_back("--" + name);
  }
  return names;
}

Words commands_of(const CLI::App& app) {
  Words names;
  for (const auto* command : app.get_subcommands([](const CLI::App*) { return true; })) {
    names.push_back(command->get_name());
  }
  return names;
}

}  // namespace

std::string explain(const CLI::App& program, const CLI::ParseError& error, const Words& words) {
  const CLI::App& app = chosen(program);
  const Words left = program.remaining(/*recurse=*/true), commands = commands_of(app);
  const bool is_for_another_program = app.get_prefix_command() && !left.empty() && !left[0].starts_with("-");
  if (is_for_another_program) return error.what();
  const auto first = std::find_if(words.begin(), words.end(),
                                  [&](const std::string& word) { return std::count(left.begin(), left.end(), word); });
  if (first == words.end()) return error.what();
  if (first->starts_with("-")) {
    const std::string flag = first->substr(0, first->find('='));
    return app.get_name() + " has no option " + flag + did_you_mean(flag, flags_of(app));
  }
  if (commands.empty()) return app.get_name() + " does not expect \"" + *first + "\"";
  const std::string near = did_you_mean(*first, commands);
  return app.get_name() + " has no command " + *first + (near.empty() ? "; there are " + join(commands, ", ") : near);
}

std::string known_model(const std::string& name) {
  const Words known = model_names();
  if (std::count(known.begin(), known.end(), name) != 0) return "";
  return "there is no model \"" + name + "\", but " + join(known, ", ") + did_you_mean(name, known);
}

std::string which_help(const CLI::App& program) {
  const CLI::App& app = chosen(program);
  std::string command = app.get_name();
  for (const CLI::App* parent = app.get_parent(); parent != nullptr; parent = parent->get_parent()) {
    command = parent->get_name() + " " + command;
  }
  return command + (app.get_help_all_ptr() == nullptr ? " --help" : " --help-all") + " shows what there is.";
}

}  // namespace lockstep::cli

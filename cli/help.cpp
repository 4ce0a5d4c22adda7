#include "help.hpp"

#include <algorithm>
#include <vector>

#include "text.hpp"

namespace lockstep::cli {

namespace {

constexpr size_t columns = 80;
constexpr size_t indent = 26;  // the indent of descriptions, in columns

std::string entry(const std::string& name, const std::string& description) {
  std::string text = "  " + name;
  const bool fits = text.size() + 2 <= indent;
  if (!fits) text += "\n";
  size_t column = fits ? text.size() : 0;
  for (const auto& line : wrap(description, columns - indent)) {
    text += std::string(indent - column, ' ') + line + "\n";
    column = 0;
  }
  return text;
}

std::string option_entry(const CLI::Option& option, bool in_brief = false) {
  std::string name = option.get_name(option.get_positional(), true);
  if (option.get_type_size() != 0 && !option.get_positional()) name += " " + option.get_type_name();
  std::string description = option.get_description();
  if (in_brief) description.resize(std::min(description.find('\n'), description.size()));
  if (!option.get_default_str().empty()) description += " (default: " + option.get_default_str() + ")";
  return entry(name, description);
}

}  // namespace

std::string Help::make_help(const CLI::App* app, std::string name, CLI::AppFormatMode mode) const {
  const auto commands = app->get_subcommands([](const CLI::App*) { return true; });
  std::string text;
  for (const auto& line : wrap(app->get_description(), columns)) text += line + "\n";

  std::string positionals;
  for (const auto* option : app->get_options([](const CLI::Option* option) { return option->get_positional(); })) {
    positionals += " " + option->get_name(true);
  }
  std::string required;
  for (const auto* option : app->get_options([](const CLI::Option* option) { return option->get_required(); })) {
    if (!option->get_positional()) required += " -" + option->get_snames().at(0) + " " + option->get_type_name();
  }
  text += "\nUsage: " + name + required + positionals + (commands.empty() ? " [OPTION...]" : " COMMAND [OPTION...]") +
          (app->get_prefix_command() ? " PROGRAM [ARGUMENT...]" : "") + "\n";

  if (!commands.empty()) text += "\nCommands:\n";
  for (const auto* command : commands) text += entry(command->get_name(), command->get_description());

  if (!first_.empty() && mode != CLI::AppFormatMode::All) {
    text += "\nThe flags to begin with:\n";
    for (const auto& flag : first_) text += option_entry(*app->get_option(flag), /*in_brief=*/true);
    return text + "\n" + first_footer_;
  }
  auto groups = app->get_groups();
  std::stable_partition(groups.begin(), groups.end(), [](const std::string& group) { return group != "Options"; });
  for (const auto& group : groups) {
    const auto options = app->get_options([&](const CLI::Option* option) { return option->get_group() == group; });
    if (options.empty()) continue;
    text += "\n" + group + ":\n";
    for (const auto* option : options) text += option_entry(*option);
  }
  return text + "\n" + app->get_footer();
}

}  // namespace lockstep::cli

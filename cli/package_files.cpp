#include "package_files.hpp"

#include <lockstep/base/error.hpp>

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "commands.hpp"

namespace lockstep::cli {

namespace {

std::string escaped(const std::string& text, const std::map<char, std::string>& by) {
  std::string made;
  for (const char letter : text) made += by.count(letter) ? by.at(letter) : std::string(1, letter);
  return made;
}

std::string in_quotes(const std::string& text) {
  return "'" + escaped(text, {{'\'', R"('\'')"}}) + "'";
}

std::string roff(const std::string& text) {
  return escaped(text, {{'-', R"(\-)"}, {'\\', R"(\e)"}, {'.', R"(\&.)"}, {'\'', R"(\(aq)"}});
}

std::vector<const CLI::App*> commands_in(const CLI::App& app) {
  return app.get_subcommands([](const CLI::App*) { return true; });
}

std::vector<const CLI::App*> program_and_commands(const CLI::App& program) {
  auto all = commands_in(program);
  all.insert(all.begin(), &program);
  return all;
}

bool takes_value(const CLI::Option& option) {
  return option.get_items_expected_max() != 0;
}

// The man page is the help as it is printed, with a section for each command.
std::string man_page(const CLI::App& program) {
  const std::string name = program.get_name(), what = program.get_description();
  std::string page = ".TH " + name + " 1 \"\" \"" + name + " " + version() + "\"\n.SH NAME\n" + name + " \\-" +
                     roff(what.substr(name.size())) + "\n";
  for (const auto* app : program_and_commands(program)) {
    const bool is_command = app != &program;
    page += ".SH \"" + name + (is_command ? " " + app->get_name() : "") + "\"\n.nf\n.in 0\n" +
            roff(app->help(is_command ? name : "", CLI::AppFormatMode::All)) + ".fi\n";
  }
  return page;
}

std::string for_bash(const CLI::App& program) {
  std::string cases;
  for (const auto* app : program_and_commands(program)) {
    std::string words, valued;
    for (const auto* command : commands_in(*app)) words += command->get_name() + " ";
    for (const auto* option : app->get_options()) {
      std::string& flags = takes_value(*option) ? valued : words;
      for (const auto& flag : option->get_snames()) flags += "-" + flag + " ";
      for (const auto& flag : option->get_lnames()) flags += "--" + flag + " ";
    }
    cases += "    " + app->get_name() + ") words=" + in_quotes(words) + " valued=" + in_quotes(valued) + " ;;\n";
  }
  return R"(_lockstep_words() {
  local command=lockstep words='' valued='' word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD - 1]}
  ((COMP_CWORD == 1)) || command=${COMP_WORDS[1]}
  case $command in
)" + cases +
         R"(  esac
  [[ " = $valued" != *" $before "* ]] || words='' valued=''  # a value: the names of files
  COMPREPLY=($(compgen -W "$words$valued" -- "$word"))
}
complete -o default -F _lockstep_words lockstep
)";
}

std::string for_zsh(const CLI::App& program) {
  return "#compdef lockstep\nautoload -U +X bashcompinit && bashcompinit\n" + for_bash(program) +
         "[[ $funcstack[1] != _lockstep ]] || _bash_complete -o default -F _lockstep_words\n";
}

std::string for_fish(const CLI::App& program) {
  const std::string line = "complete -c lockstep -n ", first = "__fish_use_subcommand";
  std::string lines = line + first + " -f\n";
  for (const auto* app : program_and_commands(program)) {
    for (const auto* command : commands_in(*app)) {
      lines += line + first + " -a " + command->get_name() + " -d " + in_quotes(command->get_description()) + "\n";
    }
    for (const auto* option : app->get_options()) {
      lines += line + (app == &program ? first : in_quotes("__fish_seen_subcommand_from " + app->get_name()));
      for (const auto& flag : option->get_snames()) lines += " -s " + flag;
      for (const auto& flag : option->get_lnames()) lines += " -l " + flag;
      const std::string help = option->get_description();
      lines += (takes_value(*option) ? " -r -d " : " -d ") + in_quotes(help.substr(0, help.find('\n'))) + "\n";
    }
  }
  return lines;
}

const std::map<std::string, std::string (*)(const CLI::App&)> shells{
    {"bash", for_bash}, {"zsh", for_zsh}, {"fish", for_fish}};

std::string cmake_dir() {
  const auto programs = std::filesystem::read_symlink("/proc/self/exe").parent_path();
  const auto dir = (programs / LOCKSTEP_CMAKE_DIR).lexically_normal();
  if (std::filesystem::exists(dir / "lockstepConfig.cmake")) return dir.string();
  throw Error("there is no CMake package in " + dir.string() + "; cmake --install puts one beside the program");
}

[[noreturn]] void print_and_exit(const std::string& text) {
  throw CLI::CallForVersion(text, 0);  // the text goes the version's way
}

}  // namespace

void add_package_flags(CLI::App& program) {
  program.add_flag_callback(
      "--cmake-dir", [] { print_and_exit(cmake_dir()); }, "print where CMake finds the package, and exit");
  program.add_flag_callback(
      "--man-page", [&program] { print_and_exit(man_page(program)); }, "print the man page, and exit");
  program
      .add_option_function<std::string>(
          "--completion", [&program](const std::string& shell) { print_and_exit(shells.at(shell)(program)); },
          "print the file of completion for a shell, bash, zsh or fish, and exit")
      ->type_name("SHELL")
      ->check([](const std::string& shell) { return shells.count(shell) ? "" : "there are bash, zsh and fish"; });
}

}  // namespace lockstep::cli

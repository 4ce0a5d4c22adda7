#include "option_flags.hpp"

#include <unistd.h>

#include <algorithm>
#include <sstream>
#include <string_view>
#include <type_traits>
#include <vector>

#include "add_option.hpp"
#include "flag_checks.hpp"
#include "output.hpp"
#include "trainer/option_pairs.hpp"
#include "trainer/option_table.hpp"
#include "trainer/option_text.hpp"
#include "usage.hpp"

namespace lockstep::cli {

namespace {

std::string flag_of(const Option& option) {
  std::string flag = option.more.flag == nullptr ? option.key : option.more.flag;
  std::replace(flag.begin(), flag.end(), '_', '-');
  return "--" + flag;
}

// Checks a text for CLI11, which must have numbers from 1 on with commas between them.
std::string epochs_list(const std::string& text) {
  std::istringstream items(text + ",");
  for (std::string item; std::getline(items, item, ',');) {
    const std::string wrong = number_between<int, 1>(item);
    if (!wrong.empty()) return wrong + "; it takes epochs as in 30,60,80";
  }
  return "";
}

// Returns the mistake in the text of a flag for a Value, or "".
template <class Value>
std::string wrong_with(const Option& option, const std::string& text) {
  if constexpr (std::is_floating_point_v<Value> || std::is_same_v<Value, std::optional<double>>) return rate(text);
  if constexpr (std::is_integral_v<Value>) return number_within<Value>(text, option.more.least, option.more.most);
  if constexpr (std::is_same_v<Value, std::chrono::seconds>)
    return number_within<int>(text, option.more.least, option.more.most);
  if constexpr (std::is_same_v<Value, std::vector<int>>) return epochs_list(text);
  if constexpr (std::is_same_v<Value, std::string>) {
    if (option.key == std::string_view("model")) return known_model(text);
  }
  return option.more.least > 0 ? not_empty(text) : "";
}

// Resets options that only have a meaning with another choice than the new one. `before` has the choices so far. What
// follows in the table, such as the text after the model, is still to be taken.
void forget_what_went_with_it(std::string_view key, const TrainOptions& before, TrainOptions& options,
                              FlatOptions& flat) {
  if (key == "optimizer" && options.optimizer.kind != before.optimizer.kind) options.rate.lr.reset();
  if (key == "schedule" && options.rate.schedule != LearningRate::Schedule::step) options.rate.step_epochs.clear();
  if (key == "compress" && flat.compress != Compression::powersgd) flat.compress_rank = 0;
  if (key == "sync_every" && flat.local.sync_every == 0) flat.local = FlatOptions().local;
  if (key == "model" && learns_text(options.model) != learns_text(before.model)) {
    flat.text.clear();
    flat.data_dir.clear();
    flat.data = Images::fashion_mnist;
  }
  if (key == "data" && flat.data == Images::synthetic) flat.data_dir.clear();
  if (key == "keep_last" && flat.keep_last == 0) flat.checkpoint_every = 0;
}

}  // namespace

void add_option_flags(CLI::App& app, Given& given) {
  const TrainOptions defaults;
  each_option(defaults, [&](const Option& option, const auto& value) {
    using Value = std::decay_t<decltype(value)>;
    if (option.group == nullptr) return;
    const std::string flag = flag_of(option), beside = remark_on_pairs(option.key);
    std::string help = option.help;
    if (!beside.empty()) help += (help.ends_with('\n') ? "" : "\n") + beside;
    help = with_flags(help);
    std::optional<std::string>& text = given[option.key];
    if constexpr (std::is_same_v<Value, bool>) {
      app.add_flag_function(
             flag, [&text](int64_t count) { text = count > 0 ? "true" : "false"; },
             help + " (" + flag + "=false turns it off, whatever --config says)")
          ->group(option.group);
    } else {
      const std::string otherwise = option.more.otherwise == nullptr ? option_text(value) : option.more.otherwise;
      OptionAdder{app}(flag.c_str(), text, option.value, help, otherwise)
          ->group(option.group)
          ->check([option](const std::string& word) { return wrong_with<Value>(option, word); });
    }
  });
}

void take_given(const Given& given, TrainOptions& options) {
  const TrainOptions before = options;
  FlatOptions flat = lockstep::flat(options);
  each_option(options, flat, [&](const Option& option, auto& value) {
    const auto found = given.find(option.key);
    if (!option.more.plain || found == given.end() || !found->second) return;
    take_text(*found->second, value);
    forget_what_went_with_it(option.key, before, options, flat);
  });
  take_flat(flat, options);
}

std::string with_flags(std::string text) {
  const TrainOptions options;
  each_option(options, [&](const Option& option, const auto&) {
    const std::string name = "`" + std::string(option.key) + "`", flag = flag_of(option);
    for (size_t at = text.find(name); at != text.npos; at = text.find(name, at)) text.replace(at, name.size(), flag);
  });
  return text;
}

void print_warning(const std::string& text) {
  Output error(STDERR_FILENO);
  print_warning(text, error);
}

void print_warning(const std::string& text, Output& error) {
  error.print("lockstep: warning: " + with_flags(text) + "\n");
}

}  // namespace lockstep::cli

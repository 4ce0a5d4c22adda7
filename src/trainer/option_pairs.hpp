// This is the table of options that do not go together. train(), fit() and the program refuse such options in the
// table's words; the flags' help and docs/guide.md list them.
#pragma once

#include <lockstep/trainer/task.hpp>
#include <lockstep/trainer/train_options.hpp>

#include "way.hpp"

#include <span>
#include <string>
#include <string_view>

namespace lockstep {

// Has the facts among which the choices of a pair are looked for.
struct Facts {
  const TrainOptions& options;
  const FlatWay& way;
  const Task* task = nullptr;  // null: no fit()
  bool is_elastic = false;
};

// A Choice is one side of a pair.
struct Choice {
  const char* key;   // the option's key; null: it is none of TrainOptions
  const char* text;  // the choice in words, the key in backquotes: "`zero_stage` 2 or 3"
  bool (*is_made)(const Facts& facts);
};

struct OptionPair {
  Choice one, other;
  const char* why;
  const char* instead = "leave one of the two out";
};

std::span<const OptionPair> forbidden_pairs();

// Throws Error, with both options' keys, for two ways of a run, and for the first pair in `facts`.
void check_pairs(const Facts& facts);

// Says the pairs whose first side is the option: "needs `grain`, not with `split`". Gives "" if there are none.
std::string remark_on_pairs(std::string_view key);

}  // namespace lockstep

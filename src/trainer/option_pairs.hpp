// This is the table of options that do not go together. train(), fit() and the program refuse such options in the
// table's words; the flags' help and docs/guide.md list them.
#pragma once

#include <lockstep/trainer/task.hpp>
#include <lockstep/trainer/train_options.hpp>

#include "flat_options.hpp"

#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

// Has the facts among which the choices of a pair are looked for.
struct Facts {
  const TrainOptions& options;
  FlatOptions flat = lockstep::flat(options);
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

// Gives all pairs. Those that only flags and config.json can have come first.
std::vector<OptionPair> forbidden_pairs();

// check_flat() throws Error, with both options' keys, for two ways of a run and other pairs that only flags and
// config.json can have. check_pairs() does so for the pairs that TrainOptions can have.
void check_flat(const FlatOptions& flat);
void check_pairs(const Facts& facts);

// Says the pairs whose first side is the option: "needs `grain`, not with `split`". Gives "" if there are none.
std::string remark_on_pairs(std::string_view key);

}  // namespace lockstep

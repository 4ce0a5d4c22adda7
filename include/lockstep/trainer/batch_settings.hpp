// BatchSettings: the samples of a run's steps, and whose part of them is how large.
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

namespace lockstep {

// How the parts of a batch are sized: the three kinds of a BalanceRule.
struct EqualParts {  // near-equal parts
  bool operator==(const EqualParts&) const = default;
};
// Parts in proportion to the devices' speed, measured while they train (balance.hpp). Two runs then differ by rounding,
// also if one was resumed; but not with a grain.
struct PartsBySpeed {
  bool operator==(const PartsBySpeed&) const = default;
};
// A list such as {2, 1}: the first device gets twice as many samples as the second (parts.hpp). If the network is
// split, the list is for its data axis.
using BalanceRule = std::variant<EqualParts, PartsBySpeed, std::vector<double>>;

// "equal", "auto", "2,1". balance_rule_from converts back. It throws Error, which says what is possible, for other
// texts.
std::string to_string(const BalanceRule& sizes);
BalanceRule balance_rule_from(const std::string& text);

struct BatchSettings {
  int64_t size = 256;  // samples of the global batch, before it is multiplied by `scale`
  int64_t scale = 1;
  bool drop_last = false;  // an epoch leaves out a last batch that is smaller (BatchOptions::drop_last)
  // A rank computes its part of a batch in so many pieces, one after the other. Memory then holds the activations of
  // one piece at a time. The gradients are the same, but BatchNorm normalises over a piece.
  int accumulate = 1;
  BalanceRule balance = EqualParts();
  // 0: none. Otherwise ranks compute whole grains of so many samples (BatchOptions::grain), and the run gives the same
  // bits however many ranks there are and whatever each of them gets.
  int64_t grain = 0;

  int64_t global() const { return size * scale; }  // samples of a step, over all ranks
};

}  // namespace lockstep

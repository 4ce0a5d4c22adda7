// BatchSettings: the samples of a run's steps, and whose part of them is how large.
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

namespace lockstep {

// Whose part of a batch is how large.
struct EqualParts {  // near-equal ones
  bool operator==(const EqualParts&) const = default;
};
// In proportion to the devices' speed, measured while they train (balance.hpp). Two runs then differ by what rounding
// leaves, also if one was resumed.
struct PartsBySpeed {
  bool operator==(const PartsBySpeed&) const = default;
};
// {2, 1}: the first device gets twice as many samples as the second (shares.hpp; of the split's data axis, if there is
// one).
using BalanceRule = std::variant<EqualParts, PartsBySpeed, std::vector<double>>;

// "equal", "auto", "2,1". And back; throws Error that says what there is.
std::string to_string(const BalanceRule& sizes);
BalanceRule balance_rule_from(const std::string& text);

struct BatchSettings {
  int64_t size = 256;  // of the global batch, times `scale`
  int64_t scale = 1;
  // In how many parts, one after the other, a rank computes its part of a batch. The gradients are the same (but
  // BatchNorm normalises over what is computed at once), and the activations of one of them are in memory at a time.
  int accumulate = 1;
  BalanceRule balance = EqualParts();

  int64_t global() const { return size * scale; }  // samples of a step, over all ranks
};

}  // namespace lockstep

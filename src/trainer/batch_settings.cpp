#include "batch_settings.hpp"

#include <lockstep/base/error.hpp>

#include "base/number_text.hpp"
#include "data/parts.hpp"

#include <algorithm>
#include <charconv>

namespace lockstep {

std::string to_string(const BalanceRule& sizes) {
  if (std::holds_alternative<EqualParts>(sizes)) return "equal";
  if (std::holds_alternative<PartsBySpeed>(sizes)) return "auto";
  std::string text;
  for (const double share : std::get<std::vector<double>>(sizes))
    text += (text.empty() ? "" : ",") + number_text(share);
  return text;
}

BalanceRule balance_rule_from(const std::string& text) {
  if (text == "equal") return EqualParts();
  if (text == "auto") return PartsBySpeed();
  std::vector<double> shares;
  const char* const end = text.data() + text.size();
  for (const char* next = text.data();; ++next) {
    const auto [rest, error] = std::from_chars(next, end, shares.emplace_back());
    if (error != std::errc() || (rest != end && *rest != ',')) break;
    if (rest == end) return shares;
    next = rest;
  }
  throw Error("the balance is \"" + text + "\"; it must be equal, auto, or a share for each device, as in 2,1");
}

int64_t grain_of(const BatchSettings& batch) {
  return batch.grain ? batch.grain->samples : 0;
}

bool balances(const BatchSettings& batch) {
  return std::holds_alternative<PartsBySpeed>(batch.balance);
}

std::vector<double> shares_of(const BatchSettings& batch) {
  const auto* const shares = std::get_if<std::vector<double>>(&batch.balance);
  return shares == nullptr ? std::vector<double>() : *shares;
}

std::vector<int64_t> sizes_of_parts(int64_t total, const std::vector<double>& shares, int ranks) {
  return sizes_by_shares(total, shares.empty() ? std::vector<double>(static_cast<size_t>(ranks), 1.0) : shares);
}

std::vector<int64_t> parts_of_full_batch(const BatchSettings& batch, const std::vector<double>& shares, int ranks) {
  const int64_t unit = std::max<int64_t>(grain_of(batch), 1), units = (batch.global() + unit - 1) / unit;
  auto sizes = sizes_of_parts(units, shares, ranks);
  int64_t left = batch.global();  // the last grain may be smaller
  for (int64_t& size : sizes) left -= size = std::min(size * unit, left);
  return sizes;
}

int64_t samples_of_epoch(const BatchSettings& batch, int64_t samples) {
  return batch.drop_last ? samples - samples % batch.global() : samples;
}

std::string remark_on_last_batch(const BatchSettings& batch, int64_t samples, int ranks) {
  const int64_t last = samples_of_epoch(batch, samples) % batch.global();
  if (last == 0) return "";
  std::vector<int64_t> alone;  // numbers of samples that are computed at once
  if (batch.grain) {
    alone.push_back(last % batch.grain->samples);
  } else {
    for (const int64_t part : sizes_of_parts(last, shares_of(batch), ranks)) {
      const int64_t turns = std::min<int64_t>(batch.accumulate, part);
      if (turns > 0) alone.push_back(part / turns);
    }
  }
  if (std::find(alone.begin(), alone.end(), 1) == alone.end()) return "";
  return "the last batch of an epoch has " + std::to_string(last) + " of " + std::to_string(samples) +
         " samples, and " + (batch.grain ? "a grain" : "a rank's part") +
         " of it has one. A BatchNorm whose channels have one value each refuses that, at the end of the first epoch; "
         "`drop_last` leaves the batch out, or take another `batch_size`";
}

std::string remark_on_idle_ranks(const BatchSettings& batch, int ranks) {
  if (!batch.grain) return "";
  const int64_t grain = batch.grain->samples, grains = (batch.global() + grain - 1) / grain;
  if (grains >= ranks) return "";
  return std::to_string(ranks - grains) + " of the " + std::to_string(ranks) +
         " ranks have nothing to do: a batch of " + std::to_string(batch.global()) + " samples has " +
         std::to_string(grains) + (grains == 1 ? " grain" : " grains") + " of " + std::to_string(grain) +
         "; fewer `devices` are as fast, and a larger `batch_size` or a smaller `grain` gives them work";
}

}  // namespace lockstep

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/number_text.hpp"
#include "parts.hpp"

namespace lockstep {

Range part_of(int64_t total, int index, int count) {
  if (total < 0 || index < 0 || index >= count) {
    throw Error("part_of: there is no part " + std::to_string(index) + " of " + std::to_string(count) + " over " +
                std::to_string(total) + " samples; it needs 0 <= index < count and at least 0 samples");
  }
  const int64_t size = total / count;
  const int64_t longer = total % count;  // the number of parts, the first ones, that hold one sample more
  const int64_t begin = index * size + std::min<int64_t>(index, longer);
  return {begin, begin + size + (index < longer ? 1 : 0)};
}

void check_shares(const std::vector<double>& shares, int count, const std::string& user, const Error::Data& data) {
  if (shares.size() != static_cast<size_t>(count)) {
    throw Error(user + ": there are " + std::to_string(shares.size()) + " shares for " + std::to_string(count) +
                    " parts; each part needs one",
                data);
  }
  for (size_t i = 0; i < shares.size(); ++i) {
    if (std::isfinite(shares[i]) && shares[i] >= 0) continue;
    throw Error(user + ": the share of part " + std::to_string(i) + " is " + number_text(shares[i]) +
                    "; a share is a finite number of at least 0",
                data);
  }
  if (std::all_of(shares.begin(), shares.end(), [](double share) { return share == 0; })) {
    throw Error(user + ": all shares are 0, so that no part would get the samples; one must be above 0", data);
  }
}

std::vector<int64_t> sizes_by_shares(int64_t total, const std::vector<double>& shares) {
  check_shares(shares, static_cast<int>(shares.size()), "sizes_by_shares");
  if (total < 0 || total > int64_t{1} << 40) {
    throw Error("sizes_by_shares: there are " + std::to_string(total) + " samples to share out; it takes 0 to 2^40");
  }
  // Divides by the largest first, so that no sum is infinite. Multiplications and divisions round the same everywhere.
  const double largest = *std::max_element(shares.begin(), shares.end());
  std::vector<double> quotas;
  for (const double share : shares) quotas.push_back(share / largest);
  const double sum = std::accumulate(quotas.begin(), quotas.end(), 0.0);
  for (double& quota : quotas) quota = static_cast<double>(total) * quota / sum;

  std::vector<int64_t> sizes;
  for (const double quota : quotas) sizes.push_back(static_cast<int64_t>(quota));
  const int64_t left = total - std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
  std::vector<size_t> order(shares.size());
  std::iota(order.begin(), order.end(), size_t{0});
  const auto lost = [&](size_t part) { return quotas[part] - std::floor(quotas[part]); };
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return lost(a) > lost(b); });
  for (int64_t i = 0; i < left; ++i) ++sizes[order[static_cast<size_t>(i)]];
  return sizes;
}

}  // namespace lockstep

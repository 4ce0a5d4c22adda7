#include "straggler.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>

#include "base/number_text.hpp"

namespace lockstep {
namespace {

constexpr double kTimesAsLong = 3;
constexpr double kSecondsPerEpoch = 1;

double per_sample(const RankTime& time) {
  return time.seconds / static_cast<double>(time.samples);
}

std::string seconds_text(double seconds) {
  return number_text(seconds, std::chars_format::fixed, 2);
}

bool is_slow(double seconds, double usual, int64_t epochs) {
  return seconds >= kTimesAsLong * usual && seconds - usual >= kSecondsPerEpoch * static_cast<double>(epochs);
}

// Gives the pipeline coordinate of a rank, as Mesh numbers them.
size_t stage_of(size_t rank, const MeshShape& mesh) {
  return rank / static_cast<size_t>(mesh.tensor) % static_cast<size_t>(mesh.pipeline);
}

struct Slowest {
  size_t rank;
  double usual;  // seconds that others take for as many samples
};

// Gives the slowest rank of `group`. Give ranks that compute the same layers and have samples.
std::optional<Slowest> slowest_of(std::vector<size_t> group, const std::vector<RankTime>& ranks, int64_t epochs) {
  if (group.size() < 2) return std::nullopt;
  std::sort(group.begin(), group.end(),
            [&](size_t a, size_t b) { return per_sample(ranks[a]) < per_sample(ranks[b]); });
  const size_t rank = group.back();
  group.pop_back();
  const double usual = per_sample(ranks[group[group.size() / 2]]) * static_cast<double>(ranks[rank].samples);
  if (!is_slow(ranks[rank].seconds, usual, epochs)) return std::nullopt;
  return Slowest{rank, usual};
}

// Names the stages of a pipeline coordinate: "stage 1", or with several stages per rank "stages 1, 3".
std::string stage_text(size_t place, const ModelSplit& split) {
  std::string text = split.stages_per_rank == 1 ? "stage " : "stages ";
  for (int turn = 0; turn < split.stages_per_rank; ++turn)
    text += (turn == 0 ? "" : ", ") + std::to_string(place + static_cast<size_t>(turn * split.mesh.pipeline));
  return text;
}

std::string slow_stage(const std::vector<std::vector<size_t>>& groups, const std::vector<RankTime>& ranks,
                       int64_t epochs, const std::vector<std::string>& names, const ModelSplit& split) {
  std::vector<double> seconds;  // seconds by stage; all stages have the same samples
  for (const auto& group : groups) {
    if (group.empty()) return "";
    const auto add = [&](double sum, size_t rank) { return sum + ranks[rank].seconds; };
    seconds.push_back(std::accumulate(group.begin(), group.end(), 0.0, add) / static_cast<double>(group.size()));
  }
  const auto slow = std::max_element(seconds.begin(), seconds.end());
  const auto place = static_cast<size_t>(slow - seconds.begin());
  const double others =
      (std::accumulate(seconds.begin(), seconds.end(), 0.0) - *slow) / static_cast<double>(seconds.size() - 1);
  if (!is_slow(*slow, others, epochs)) return "";
  std::string who, all;
  for (const size_t rank : groups[place]) who += (who.empty() ? "" : ", ") + names[rank];
  for (size_t i = 0; i < seconds.size(); ++i) {
    all += (i == 0 ? "" : "; ") + stage_text(i, split) + ": " + seconds_text(seconds[i] / static_cast<double>(epochs)) +
           " s";
  }
  return stage_text(place, split) + " of the pipeline (" + who +
         ") made the others wait; computing took per epoch: " + all +
         ". Either the device there is slow, or it has too much of the network. `lockstep plan` measures each layer, "
         "and `split` takes its division";
}

}  // namespace

std::string straggler_of(const std::vector<RankTime>& ranks, int64_t epochs, const std::vector<std::string>& names,
                         const ModelSplit& split) {
  const auto is_unknown = [](const RankTime& time) { return std::isnan(time.seconds); };
  if (epochs < 1 || std::any_of(ranks.begin(), ranks.end(), is_unknown)) return "";
  std::vector<std::vector<size_t>> groups(static_cast<size_t>(split.mesh.pipeline));
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    if (ranks[rank].samples > 0) groups[stage_of(rank, split.mesh)].push_back(rank);
  }
  const bool is_pipeline = groups.size() > 1;
  std::optional<Slowest> worst;
  const auto lost = [&](const Slowest& slow) { return ranks[slow.rank].seconds - slow.usual; };
  for (const auto& group : groups) {
    const auto slow = slowest_of(group, ranks, epochs);
    if (slow && (!worst || lost(*slow) > lost(*worst))) worst = slow;
  }
  if (!worst) return is_pipeline ? slow_stage(groups, ranks, epochs, names, split) : "";
  const auto per_epoch = [&](double seconds) { return seconds_text(seconds / static_cast<double>(epochs)); };
  return names[worst->rank] + " is slow: it computed for " + per_epoch(ranks[worst->rank].seconds) +
         " s per epoch, where others" + (is_pipeline ? " of its stage" : "") + " take " + per_epoch(worst->usual) +
         " s for as many samples; they waited for it";
}

}  // namespace lockstep

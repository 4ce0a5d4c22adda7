#include "rank_tables.hpp"

#include <lockstep/base/error.hpp>

namespace lockstep {

io::NamedTensors tables_of_all_ranks(const io::NamedTensors& mine, Rank& rank) {
  io::NamedTensors tables;
  for (const auto& [name, tensor] : mine) tables.emplace_back(name, rank.allgather(tensor.to(rank.device())));
  return tables;
}

void check_tables(const RunState& state) {
  bool has_totals = false;
  for (const auto& [name, table] : tensors_under("ranks", state.tensors)) {
    const auto is = [&, &table = table](int64_t dimensions, at::ScalarType type) {
      return table.dim() == dimensions && table.scalar_type() == type;
    };
    if (name == "totals") has_totals = true;
    const bool fits = name == "totals"  ? is(2, at::kDouble) && table.size(1) == 4
                      : name == "rng"   ? is(2, at::kByte)
                      : name == "order" ? is(2, at::kLong)
                                        : table.dim() > 0;
    if (fits && table.size(0) > 0) continue;
    throw Error("cannot go on: the checkpoint's tensor 'ranks." + name + "' is no table with a row for each rank",
                {Error::file});
  }
  if (state.steps > 0 && !has_totals) {
    throw Error("cannot go on: the checkpoint is of within an epoch, and lacks the tensor 'ranks.totals'",
                {Error::file});
  }
}

}  // namespace lockstep

#include "parts.hpp"

#include <lockstep/base/error.hpp>
#include <nlohmann/json.hpp>

#include "base/classic.hpp"
#include "comm/arguments.hpp"

namespace lockstep::comm {
namespace {

using Texts = std::vector<std::string>;

Texts describe_all(const std::vector<at::Tensor>& tensors) {
  Texts texts;
  for (const auto& tensor : tensors) texts.push_back(describe(tensor));
  return texts;
}

void check(int from, const std::string& sends, int to, const std::string& expects) {
  if (sends == expects) return;
  throw Error(classic_text("alltoall: rank ", from, " sends ", sends, " to rank ", to, ", which expects ", expects),
              {Error::difference});
}

}  // namespace

std::string compare_parts(c10d::Store& store, const std::string& key, int rank, const std::vector<at::Tensor>& inputs,
                          const std::vector<at::Tensor>& outputs) {
  const auto sends = describe_all(inputs), expects = describe_all(outputs);
  const std::string mine = key + std::to_string(rank);
  store.set(mine, nlohmann::json{{"sends", sends}, {"expects", expects}}.dump());
  for (int other = 0; other < static_cast<int>(inputs.size()); ++other) {
    const std::string theirs = key + std::to_string(other);
    if (other == rank) {
      check(rank, sends[rank], rank, expects[rank]);
    } else if (store.check({theirs})) {
      const auto parts = nlohmann::json::parse(store.get_to_str(theirs));
      check(rank, sends[other], other, parts.at("expects").at(rank));
      check(other, parts.at("sends").at(rank), rank, expects[other]);
    }
  }
  return mine;
}

}  // namespace lockstep::comm

#include "equal_modules.hpp"

#include <c10/core/GradMode.h>
#include <c10/util/StringUtil.h>
#include <lockstep/base/error.hpp>

#include "gather.hpp"

#include <algorithm>
#include <functional>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace lockstep {
namespace {

void check_that_modules_match(const torch::nn::Module& module, Rank& rank, const std::string& user) {
  std::vector<std::pair<std::string, torch::Tensor>> tensors;
  for (const auto& item : module.named_parameters()) tensors.emplace_back(item.key(), item.value());
  for (const auto& item : module.named_buffers()) tensors.emplace_back(item.key(), item.value());
  const auto count = static_cast<int64_t>(tensors.size());
  const torch::Tensor counts = of_all_ranks(rank, {count});
  for (int other = 0; other < rank.world_size(); ++other) {
    const auto their_count = counts[other][0].item<int64_t>();
    if (their_count == count) continue;
    throw Error(user + ": the ranks' modules differ: rank " + std::to_string(rank.index()) + " has " +
                std::to_string(count) + " parameters and buffers, rank " + std::to_string(other) + " has " +
                std::to_string(their_count) + ". Every rank must build the same module");
  }

  // Names, shapes, types and orders in memory as one number each, so that a difference is found before bytes come to
  // the wrong places: gradients travel as they lie. All ranks find the same one.
  const auto describe = [&tensors](int64_t i) {
    const auto& [name, tensor] = tensors[static_cast<size_t>(i)];
    const std::string order = tensor.is_contiguous() ? "" : c10::str(" with strides ", tensor.strides());
    return name + ", " + c10::toString(tensor.scalar_type()) + " " + c10::str(tensor.sizes()) + order;
  };
  std::vector<int64_t> kinds;
  for (int64_t i = 0; i < count; ++i) kinds.push_back(static_cast<int64_t>(std::hash<std::string>()(describe(i))));
  const torch::Tensor all_kinds = of_all_ranks(rank, kinds);
  for (int64_t i = 0; i < count; ++i) {
    for (int other = 1; other < rank.world_size(); ++other) {
      if (all_kinds[other][i].item<int64_t>() == all_kinds[0][i].item<int64_t>()) continue;
      const std::string first = shared_text(describe(i), rank, 0), second = shared_text(describe(i), rank, other);
      throw Error(user + ": the ranks' modules differ: parameter or buffer " + std::to_string(i) + " is " + first +
                  " on rank 0, and " + second + " on rank " + std::to_string(other) +
                  ". Every rank must build the same module, with the same names in the same order");
    }
  }

  std::vector<int64_t> addresses{rank.process()};  // which mean something within their process only
  for (const auto& [name, tensor] : tensors) addresses.push_back(reinterpret_cast<int64_t>(tensor.const_data_ptr()));
  const torch::Tensor table = of_all_ranks(rank, addresses);
  const std::set<int64_t> mine(addresses.begin() + 1, addresses.end());
  for (int other = 0; other < rank.world_size(); ++other) {
    if (other == rank.index() || table[other][0].item<int64_t>() != rank.process()) continue;
    for (int64_t i = 1; i <= count; ++i) {
      const auto address = table[other][i].item<int64_t>();
      if (address == 0 || mine.count(address) == 0) continue;  // 0: no elements
      throw Error(user + ": ranks " + std::to_string(std::min(rank.index(), other)) + " and " +
                  std::to_string(std::max(rank.index(), other)) +
                  " hold the same parameters in memory, not replicas (a copy of a torch::nn::Module shares its "
                  "tensors). Build the module inside the function given to run()");
    }
  }
}

}  // namespace

void make_modules_equal(torch::nn::Module& module, Rank& rank, const std::string& user) {
  const torch::NoGradGuard no_grad;
  module.to(rank.device());
  check_that_modules_match(module, rank, user);
  for (const auto& parameter : module.parameters()) rank.broadcast(parameter);
  for (const auto& buffer : module.buffers()) rank.broadcast(buffer);
}

}  // namespace lockstep

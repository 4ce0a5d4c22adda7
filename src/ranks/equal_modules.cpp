#include "equal_modules.hpp"

#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <lockstep/base/error.hpp>

#include "base/classic.hpp"
#include "comm/purpose.hpp"
#include "gather.hpp"
#include "rank_wait.hpp"

#include <algorithm>
#include <functional>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

namespace lockstep {
namespace {

using ModuleTensors = std::vector<std::pair<std::string, torch::Tensor>>;

std::string describe_entry(const ModuleTensors& tensors, int64_t i) {
  const auto& [name, tensor] = tensors[static_cast<size_t>(i)];
  const std::string order = tensor.is_contiguous() ? "" : classic_text(" with strides ", tensor.strides());
  return name + ", " + c10::toString(tensor.scalar_type()) + " " + classic_text(tensor.sizes()) + order;
}

// Gives names, shapes, types and orders in memory as one number each. So a difference is found before bytes come to the
// wrong places: gradients are sent in the order in which they lie in memory.
std::vector<int64_t> kinds_of(const ModuleTensors& tensors) {
  std::vector<int64_t> kinds;
  for (size_t i = 0; i < tensors.size(); ++i) {
    kinds.push_back(static_cast<int64_t>(std::hash<std::string>()(describe_entry(tensors, static_cast<int64_t>(i)))));
  }
  return kinds;
}

int64_t digest_of(const std::vector<int64_t>& numbers) {
  const auto* const bytes = reinterpret_cast<const char*>(numbers.data());
  return static_cast<int64_t>(std::hash<std::string_view>()({bytes, numbers.size() * sizeof(int64_t)}));
}

// Gives 0, which means not known, if reading the values would keep the host waiting.
int64_t digest_of_values(const ModuleTensors& tensors) {
  std::vector<int64_t> hashes;
  for (const auto& [name, tensor] : tensors) {
    if (!tensor.is_cpu()) return 0;
    const torch::Tensor whole = tensor.contiguous();
    const auto* const bytes = static_cast<const char*>(whole.const_data_ptr());
    hashes.push_back(static_cast<int64_t>(std::hash<std::string_view>()({bytes, whole.nbytes()})));
  }
  return digest_of(hashes);
}

// Throws Error that names the first difference, the same on all ranks.
[[noreturn]] void name_difference(const ModuleTensors& tensors, const std::vector<int64_t>& kinds, Rank& rank,
                                  const std::string& user) {
  const torch::Tensor all_kinds = of_all_ranks(rank, kinds);
  for (int64_t i = 0; i < static_cast<int64_t>(kinds.size()); ++i) {
    for (int other = 1; other < rank.world_size(); ++other) {
      if (all_kinds[other][i].item<int64_t>() == all_kinds[0][i].item<int64_t>()) continue;
      const std::string first = shared_text(describe_entry(tensors, i), rank, 0),
                        second = shared_text(describe_entry(tensors, i), rank, other);
      throw Error(user + ": the ranks' modules differ: parameter or buffer " + std::to_string(i) + " is " + first +
                      " on rank 0, and " + second + " on rank " + std::to_string(other) +
                      ". Every rank must build the same module, with the same names in the same order",
                  {Error::difference, {0, other}});
    }
  }
  throw Error(user + ": the ranks' modules differ. Every rank must build the same module", {Error::difference});
}

// `processes` are the processes of the ranks.
void check_that_memory_differs(const ModuleTensors& tensors, const std::vector<int64_t>& processes, Rank& rank,
                               const std::string& user) {
  std::vector<int64_t> addresses;  // valid within one process only
  for (const auto& [name, tensor] : tensors) addresses.push_back(reinterpret_cast<int64_t>(tensor.const_data_ptr()));
  const torch::Tensor table = of_all_ranks(rank, addresses);
  const std::set<int64_t> mine(addresses.begin(), addresses.end());
  for (int other = 0; other < rank.world_size(); ++other) {
    if (other == rank.index() || processes[static_cast<size_t>(other)] != rank.process()) continue;
    for (size_t i = 0; i < addresses.size(); ++i) {
      const auto address = table[other][static_cast<int64_t>(i)].item<int64_t>();
      if (address == 0 || mine.count(address) == 0) continue;  // 0: no elements
      throw Error(user + ": ranks " + std::to_string(std::min(rank.index(), other)) + " and " +
                      std::to_string(std::max(rank.index(), other)) +
                      " hold the same parameters in memory, not replicas (a copy of a torch::nn::Module shares its "
                      "tensors). Build the module inside the function given to run()",
                  {Error::difference, {std::min(rank.index(), other), std::max(rank.index(), other)}});
    }
  }
}

// Most often one small exchange shows that all is well. Gives whether the values are known to be equal.
bool check_that_modules_match(const ModuleTensors& tensors, Rank& rank, const std::string& user) {
  const auto count = static_cast<int64_t>(tensors.size());
  const auto kinds = kinds_of(tensors);
  const torch::Tensor all = of_all_ranks(rank, {count, digest_of(kinds), rank.process(), digest_of_values(tensors)});
  std::vector<int64_t> processes;
  bool same = true, same_values = all[0][3].item<int64_t>() != 0;
  for (int other = 0; other < rank.world_size(); ++other) {
    const auto their_count = all[other][0].item<int64_t>();
    if (their_count != count) {
      throw Error(user + ": the ranks' modules differ: rank " + std::to_string(rank.index()) + " has " +
                      std::to_string(count) + " parameters and buffers, rank " + std::to_string(other) + " has " +
                      std::to_string(their_count) + ". Every rank must build the same module",
                  {Error::difference, {std::min(rank.index(), other), std::max(rank.index(), other)}});
    }
    same = same && all[other][1].item<int64_t>() == all[0][1].item<int64_t>();
    processes.push_back(all[other][2].item<int64_t>());
    same_values = same_values && all[other][3].item<int64_t>() == all[0][3].item<int64_t>();
  }
  if (!same) name_difference(tensors, kinds, rank, user);
  const std::set<int64_t> different(processes.begin(), processes.end());
  if (count > 0 && different.size() < processes.size()) check_that_memory_differs(tensors, processes, rank, user);
  return same_values;
}

// Sends rank 0's values, with all calls under way at the same time.
void broadcast_entries(const ModuleTensors& tensors, Rank& rank) {
  std::vector<std::vector<torch::Tensor>> packed;
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  for (const auto& [name, tensor] : tensors) packed.push_back({tensor.contiguous()});  // NCCL needs them contiguous
  try {
    for (auto& one : packed) works.push_back(rank.backend().broadcast(one, c10d::BroadcastOptions()));
    for (size_t i = 0; i < works.size(); ++i) {
      works[i]->wait();
      if (!packed[i][0].is_same(tensors[i].second)) tensors[i].second.copy_(packed[i][0]);
    }
  } catch (...) {
    if (!rank.device().is_cpu()) std::for_each(works.begin(), works.end(), wait_on_stream);
    throw;
  }
  rank.backend();  // throws if the run has failed meanwhile
}

// Refuses tensors that were computed from others, which are wrong from the second step on, and those made in
// InferenceMode, which cannot be trained.
void refuse_untrainable(const torch::nn::Module& module, const Rank& rank, const std::string& user) {
  const auto refuse = [&](const std::string& why) { throw Error(rank.name() + ": " + user + ": " + why); };
  const auto check = [&](const std::string& what, const torch::Tensor& tensor) {
    if (!tensor.defined()) return;
    if (tensor.is_inference() && !c10::InferenceMode::is_enabled()) {
      refuse(what +
             " was made in InferenceMode, and such a tensor cannot change outside of it. Build the module, and " +
             "load its weights, under NoGradGuard");
    }
    if (tensor.grad_fn()) {
      refuse(what + " was computed from other tensors that need gradients, so it would keep the graph and the value " +
             "of before the first step. Compute it in forward(), or register its detach()");
    }
  };
  for (const auto& item : module.named_parameters()) check("the parameter " + item.key(), item.value());
  for (const auto& item : module.named_buffers()) check("the buffer " + item.key(), item.value());
}

}  // namespace

void make_modules_equal(torch::nn::Module& module, Rank& rank, const std::string& user) {
  refuse_untrainable(module, rank, user);
  const torch::NoGradGuard no_grad;
  const std::string use = "making a " + user;
  const comm::Purpose purpose(use);
  module.to(rank.device());
  ModuleTensors tensors;
  for (const auto& item : module.named_parameters()) {
    const bool frozen = !item.value().requires_grad();  // has to be equal on all ranks: frozen ones are not averaged
    tensors.emplace_back(item.key() + (frozen ? " (requires_grad false)" : ""), item.value());
  }
  for (const auto& item : module.named_buffers()) tensors.emplace_back(item.key(), item.value());
  if (!check_that_modules_match(tensors, rank, user)) broadcast_entries(tensors, rank);
}

}  // namespace lockstep

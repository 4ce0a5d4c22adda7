#include "split_optimizer_state.hpp"

#include <c10/core/GradMode.h>
#include <lockstep/base/error.hpp>

#include <map>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "optim/optimizer_state.hpp"
#include "ranks/gather.hpp"

namespace lockstep {
namespace {

// A member's values stand in for the weights of a network like the one that was split, which is then split, or
// gathered, as that one is. In double precision, in which every member's values and step counts are what they were.
torch::nn::Sequential stand_in(const MakeNet& make_net) {
  auto net = make_net();
  net->to(torch::kDouble);
  return net;
}

bool is_whole(SplitModel& net) {
  return net.mesh().shape().size() == net.mesh().shape().data;
}

io::NamedTensors parameters_of(const torch::nn::Sequential& net) {
  io::NamedTensors parameters;
  for (const auto& item : net->named_parameters()) parameters.emplace_back(item.key(), item.value());
  return parameters;
}

// What members there are, and how to make them of doubles again.
struct Member {
  torch::ScalarType type;
  bool is_number;  // one per parameter: a count of steps
};
using Members = std::map<std::string, Member>;

Members members_of(const io::NamedTensors& state, const io::NamedTensors& parameters) {
  const std::map<std::string, torch::Tensor> by_name(parameters.begin(), parameters.end());
  Members members;
  for (const auto& [name, tensor] : state) {
    const auto parameter = by_name.find(name.substr(name.find('.') + 1));
    const bool is_number = parameter != by_name.end() && tensor.dim() == 0 && parameter->second.dim() > 0;
    members[name.substr(0, name.find('.'))] = {tensor.scalar_type(), is_number};
  }
  return members;
}

// Also those that a rank without parameters knows nothing of.
Members members_of_all_ranks(const Members& mine, Rank& rank) {
  std::string text;
  for (const auto& [name, member] : mine) {
    text += name + ' ' + std::to_string(static_cast<int>(member.type)) + ' ' + (member.is_number ? "1 " : "0 ");
  }
  Members all;
  for (const auto& line : texts_of_all_ranks(text, rank)) {
    std::istringstream words(line);
    std::string name;
    int type = 0, is_number = 0;
    while (words >> name >> type >> is_number) all[name] = {static_cast<torch::ScalarType>(type), is_number != 0};
  }
  return all;
}

torch::Tensor of_parameter(const torch::Tensor& whole, const Member& member) {
  return (member.is_number ? whole.flatten()[0] : whole).to(member.type).clone();
}

}  // namespace

io::NamedTensors whole_optimizer_state(const torch::optim::Optimizer& optimizer, SplitModel& net, Rank& rank,
                                       const MakeNet& make_net) {
  const torch::NoGradGuard no_grad;
  const io::NamedTensors parameters = parameters_of(net.module());
  const io::NamedTensors mine = optimizer_state(optimizer, parameters);
  if (is_whole(net)) return mine;
  const std::map<std::string, torch::Tensor> values(mine.begin(), mine.end());
  const Members members = members_of_all_ranks(members_of(mine, parameters), rank);
  io::NamedTensors whole;
  if (members.empty()) return whole;

  SplitModel parts(stand_in(make_net), rank, net.split());
  for (const auto& [name, member] : members) {
    for (const auto& [parameter, tensor] : parameters_of(parts.module())) {
      const auto value = values.find(name + "." + parameter);
      if (value == values.end()) throw Error("the optimizer has no " + name + " of the parameter " + parameter);
      tensor.copy_(value->second);
    }
    auto gathered = stand_in(make_net);
    parts.gather(gathered);
    for (const auto& [parameter, tensor] : parameters_of(gathered)) {
      whole.emplace_back(name + "." + parameter, of_parameter(tensor, member));
    }
  }
  return whole;
}

void load_whole_optimizer_state(torch::optim::Optimizer& optimizer, SplitModel& net, Rank& rank,
                                const MakeNet& make_net, const io::NamedTensors& state) {
  const torch::NoGradGuard no_grad;
  const io::NamedTensors parameters = parameters_of(net.module());
  if (is_whole(net)) return load_optimizer_state(optimizer, parameters, state);
  const std::map<std::string, torch::Tensor> values(state.begin(), state.end());
  io::NamedTensors mine;
  for (const auto& [name, member] : members_of(state, parameters_of(make_net()))) {
    const auto whole = stand_in(make_net);
    for (const auto& [parameter, tensor] : parameters_of(whole)) {
      const auto value = values.find(name + "." + parameter);
      if (value == values.end()) throw Error("the optimizer's state lacks " + name + " of the parameter " + parameter);
      tensor.copy_(value->second);
    }
    SplitModel parts(whole, rank, net.split());
    for (const auto& [parameter, tensor] : parameters_of(parts.module())) {
      mine.emplace_back(name + "." + parameter, of_parameter(tensor, member));
    }
  }
  load_optimizer_state(optimizer, parameters, mine);
}

}  // namespace lockstep

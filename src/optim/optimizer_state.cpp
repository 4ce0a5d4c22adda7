#include "optimizer_state.hpp"

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>
#include <c10/util/Type.h>
#include <torch/serialize/archive.h>
#include <lockstep/base/error.hpp>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <typeinfo>
#include <vector>

#include "base/classic.hpp"
#include "base/number_text.hpp"

namespace lockstep {
namespace {

using nlohmann::json;
using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

// Gives an archive that reads what another one wrote. Nothing of its format gets into a file.
InputArchive reread(OutputArchive& archive) {
  Classic<std::stringstream> bytes;
  archive.save_to(bytes);
  InputArchive read;
  read.load_from(bytes);
  return read;
}

// Gives the name of a parameter in an archive: LibTorch knows parameters by their addresses.
std::string archive_key(const at::Tensor& parameter) {
  return std::to_string(reinterpret_cast<size_t>(parameter.unsafeGetTensorImpl()));
}

at::Tensor tensor_of(const c10::IValue& value, const std::string& member) {
  if (value.isTensor()) return value.toTensor();
  if (value.isInt()) return at::scalar_tensor(value.toInt(), at::kLong);
  if (value.isDouble()) return at::scalar_tensor(value.toDouble(), at::kDouble);
  throw Error("the optimizer's state has a member " + member + " of type " + value.tagKind() +
              ", which checkpoints do not know; train with another optimizer, or without checkpoints (`keep_last` 0)");
}

c10::IValue value_of(const at::Tensor& tensor, const at::Tensor& parameter) {
  if (tensor.dim() == 0 && tensor.scalar_type() == at::kLong) return tensor.item<int64_t>();
  if (tensor.dim() == 0 && tensor.scalar_type() == at::kDouble && parameter.dim() > 0) return tensor.item<double>();
  at::Tensor here = tensor.sizes() == parameter.sizes() ? at::empty_like(parameter, parameter.options(), {})
                                                        : at::empty(tensor.sizes(), parameter.options());
  return here.to(tensor.scalar_type()).copy_(tensor);
}

void copy_entries(InputArchive& from, OutputArchive& to, const std::string& but = {}) {
  for (const std::string& key : from.keys()) {
    if (key == but) continue;
    c10::IValue value;
    from.read(key, value);
    if (!value.isObject()) {
      to.write(key, value);
      continue;
    }
    InputArchive part;
    from.read(key, part);
    OutputArchive copied(to.compilation_unit());
    copy_entries(part, copied);
    to.write(key, copied);
  }
}

// Holds tensors by parameter, then by member.
using ByParameter = std::map<std::string, std::map<std::string, at::Tensor>>;

ByParameter by_parameter(const io::NamedTensors& state) {
  ByParameter members;
  for (const auto& [name, tensor] : state) {
    const auto [member, parameter] = parts_of_state_name(name);
    members[parameter][member] = tensor;
  }
  return members;
}

// Makes the archive that the optimizer would save if `members` were its state.
InputArchive archive_with(const ByParameter& members, const io::NamedTensors& parameters,
                          const torch::optim::Optimizer& optimizer) {
  OutputArchive saved;
  optimizer.save(saved);
  InputArchive present = reread(saved);
  const auto keys = present.keys();
  if (std::find(keys.begin(), keys.end(), "state") == keys.end()) throw Error("this optimizer has no save()");

  OutputArchive whole;
  copy_entries(present, whole, "state");
  OutputArchive states(whole.compilation_unit());
  for (const auto& [name, parameter] : parameters) {
    const auto found = members.find(name);
    if (found == members.end()) continue;
    OutputArchive one(whole.compilation_unit());
    for (const auto& [member, tensor] : found->second) one.write(member, value_of(tensor, parameter));
    states.write(archive_key(parameter), one);
  }
  whole.write("state", states);
  return reread(whole);
}

// Refuses a state of another network, by a member that has as many dimensions as its parameter, but another shape.
// Members with fewer or more dimensions may be right: they keep rows or columns of a matrix.
void check_shapes(const ByParameter& members, const io::NamedTensors& parameters) {
  for (const auto& [name, parameter] : parameters) {
    const auto found = members.find(name);
    if (found == members.end()) continue;
    for (const auto& [member, tensor] : found->second) {
      if (tensor.dim() != parameter.dim() || tensor.sizes() == parameter.sizes()) continue;
      throw Error("the state '" + member + "." + name + "' has the shape " + classic_text(tensor.sizes()) +
                  ", and the parameter " + classic_text(parameter.sizes()));
    }
  }
}

std::string names_of_members(const ByParameter& by_parameter) {
  std::set<std::string> names;
  for (const auto& [parameter, members] : by_parameter) {
    for (const auto& [member, tensor] : members) names.insert(member);
  }
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

void replace_state(torch::optim::Optimizer& optimizer, const io::NamedTensors& parameters, const ByParameter& members) {
  try {
    InputArchive archive = archive_with(members, parameters, optimizer);
    optimizer.load(archive);
  } catch (const c10::Error&) {  // its text speaks of LibTorch's own source
    throw Error("the state is of another kind of optimizer: it has " + names_of_members(members));
  }
}

std::set<std::string> names_in(const io::NamedTensors& state) {
  std::set<std::string> names;
  for (const auto& [name, tensor] : state) names.insert(name);
  return names;
}

// ---- options

constexpr const char* kKind = "kind";  // the key of the options' type, by which Adam's are not AdamW's

// Gives null for a type that JSON lacks.
json json_of(const c10::IValue& value) {
  if (value.isBool()) return value.toBool();
  if (value.isInt()) return value.toInt();
  if (value.isDouble() && !std::isfinite(value.toDouble())) return number_text(value.toDouble());
  if (value.isDouble()) return value.toDouble();
  if (!value.isTuple()) return nullptr;
  json list = json::array();
  for (const auto& element : value.toTupleRef().elements()) list.push_back(json_of(element));
  return list;
}

c10::IValue value_of(const json& member) {
  if (member.is_boolean()) return member.get<bool>();
  if (member.is_number_integer()) return member.get<int64_t>();
  if (member.is_number()) return member.get<double>();
  if (member == "nan" || member == "inf" || member == "-inf")
    return member == "nan" ? std::nan("") : member == "inf" ? HUGE_VAL : -HUGE_VAL;
  if (!member.is_array()) throw Error("an option is " + member.dump() + ", which is no number");
  std::vector<c10::IValue> elements;
  for (const json& element : member) elements.push_back(value_of(element));
  return c10::ivalue::Tuple::create(std::move(elements));
}

// Calls use(name, value) for each option. An optimizer whose options cannot be saved has none.
template <class Use>
void each_member(const torch::optim::OptimizerOptions& options, const Use& use) {
  OutputArchive written;
  try {
    options.serialize(written);
  } catch (const c10::Error&) {
    return;
  }
  InputArchive read = reread(written);
  for (const std::string& name : read.keys()) {
    c10::IValue value;
    read.read(name, value);
    use(name, value);
  }
}

json members_of(const torch::optim::OptimizerOptions& options) {
  json members = {{kKind, c10::demangle(typeid(options).name())}};
  each_member(options, [&](const std::string& name, const c10::IValue& value) {
    if (const json member = json_of(value); !member.is_null()) members[name] = member;
  });
  return members;
}

void set_members(torch::optim::OptimizerOptions& options, const json& members) {
  OutputArchive written;
  bool any = false;
  each_member(options, [&](const std::string& name, const c10::IValue& value) {
    written.write(name, members.contains(name) ? value_of(members[name]) : value);
    any = true;
  });
  if (!any) return;
  InputArchive read = reread(written);
  options.serialize(read);
}

void check_kind(const torch::optim::OptimizerOptions& here, const json& members) {
  const json mine = members_of(here);
  if (!members.is_object() || !members.contains(kKind) || members[kKind] != mine[kKind]) {
    throw Error("the options are of another kind of optimizer: they are " + members.dump() + ", and this one's are " +
                mine.dump());
  }
  try {
    set_members(*here.clone(), members);
  } catch (const c10::Error&) {  // its text speaks of LibTorch's own source
    throw Error("the options are not like this optimizer's: they are " + members.dump());
  }
}

json parsed(const std::string& text) {
  try {
    return json::parse(text);
  } catch (const json::exception&) {
    throw Error("its options are no JSON: " + text);
  }
}

}  // namespace

std::pair<std::string, std::string> parts_of_state_name(const std::string& name) {
  const size_t dot = name.find('.');
  if (dot == std::string::npos) throw Error("'" + name + "' is not the name of an optimizer's state");
  return {name.substr(0, dot), name.substr(dot + 1)};
}

io::NamedTensors optimizer_state(const torch::optim::Optimizer& optimizer, const io::NamedTensors& parameters) {
  const at::NoGradGuard no_grad;
  io::NamedTensors state;
  for (const auto& [name, parameter] : parameters) {
    const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
    if (found == optimizer.state().end()) continue;
    OutputArchive written;
    try {
      found->second->serialize(written);
    } catch (const c10::Error& error) {
      throw Error(std::string("the optimizer's state cannot be saved: ") + error.what_without_backtrace());
    }
    InputArchive members = reread(written);
    for (const std::string& member : members.keys()) {
      c10::IValue value;
      members.read(member, value);
      state.emplace_back(member + "." + name, tensor_of(value, member));
    }
  }
  return state;
}

void load_optimizer_state(torch::optim::Optimizer& optimizer, const io::NamedTensors& parameters,
                          const io::NamedTensors& state) {
  const at::NoGradGuard no_grad;
  const ByParameter members = by_parameter(state);
  check_shapes(members, parameters);
  auto before = std::move(optimizer.state());
  optimizer.state().clear();
  try {
    if (!state.empty()) replace_state(optimizer, parameters, members);
    const auto given = names_in(state), taken = names_in(optimizer_state(optimizer, parameters));
    for (const std::string& name : given) {
      if (taken.count(name) == 0) throw Error("the optimizer has no place for the state '" + name + "'");
    }
  } catch (...) {
    optimizer.state() = std::move(before);
    throw;
  }
}

std::string options_text(const torch::optim::Optimizer& optimizer) {
  json groups = json::array();
  for (const auto& group : optimizer.param_groups()) groups.push_back(members_of(group.options()));
  return groups.dump();
}

void load_options(torch::optim::Optimizer& optimizer, const std::string& text) {
  const json groups = parsed(text);
  auto& here = optimizer.param_groups();
  if (!groups.is_array() || groups.size() != here.size()) {
    throw Error("the options are of " + std::to_string(groups.is_array() ? groups.size() : 0) +
                " groups of parameters, and this optimizer has " + std::to_string(here.size()));
  }
  for (size_t i = 0; i < here.size(); ++i) check_kind(here[i].options(), groups[i]);
  for (size_t i = 0; i < here.size(); ++i) set_members(here[i].options(), groups[i]);
}

}  // namespace lockstep

#include "group_options.hpp"

#include <lockstep/base/error.hpp>
#include <nlohmann/json.hpp>

#include "archives.hpp"
#include "base/number_text.hpp"

#include <cmath>
#include <memory>
#include <utility>
#include <vector>

namespace lockstep {
namespace {

using nlohmann::json;
using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

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
  if (member.is_string()) return member == "nan" ? std::nan("") : member == "inf" ? HUGE_VAL : -HUGE_VAL;
  if (!member.is_array()) return {};
  std::vector<c10::IValue> elements;
  for (const json& element : member) elements.push_back(value_of(element));
  return c10::ivalue::Tuple::create(std::move(elements));
}

json members_of(const torch::optim::OptimizerOptions& options) {
  OutputArchive written;
  try {
    options.serialize(written);
  } catch (const c10::Error&) {  // an optimizer that cannot save them
    return json::object();
  }
  InputArchive read = reread(written);
  json members = json::object();
  for (const std::string& name : read.keys()) {
    c10::IValue value;
    read.read(name, value);
    members[name] = json_of(value);
  }
  return members;
}

std::unique_ptr<torch::optim::OptimizerOptions> with_members(const torch::optim::OptimizerOptions& like,
                                                             const json& members) {
  const json before = members_of(like);
  for (const auto& [name, value] : before.items()) {
    if (!members.contains(name)) throw Error("the options are of another kind of optimizer: they lack " + name);
  }
  if (members.size() != before.size()) throw Error("the options are of another kind of optimizer: " + members.dump());
  auto options = like.clone();
  if (members.empty()) return options;
  OutputArchive written;
  for (const auto& [name, value] : members.items()) written.write(name, value_of(value));
  InputArchive read = reread(written);
  try {
    options->serialize(read);
  } catch (const c10::Error&) {  // whose text speaks of LibTorch's own source
    throw Error("the options are of another kind of optimizer: " + members.dump());
  }
  return options;
}

json parsed(const std::string& text) {
  try {
    return json::parse(text);
  } catch (const json::exception&) {
    throw Error("its options are no JSON: " + text);
  }
}

}  // namespace

std::string options_text(const torch::optim::Optimizer& optimizer) {
  json groups = json::array();
  for (const auto& group : optimizer.param_groups()) groups.push_back(members_of(group.options()));
  return groups.dump();
}

void load_options(torch::optim::Optimizer& optimizer, const std::string& text) {
  const json groups = parsed(text);
  auto& here = optimizer.param_groups();
  if (groups.size() != here.size()) {
    throw Error("the options are of " + std::to_string(groups.size()) +
                " groups of parameters, and this optimizer has " + std::to_string(here.size()));
  }
  std::vector<std::unique_ptr<torch::optim::OptimizerOptions>> options;
  for (size_t i = 0; i < here.size(); ++i) options.push_back(with_members(here[i].options(), groups[i]));
  for (size_t i = 0; i < here.size(); ++i) here[i].set_options(std::move(options[i]));
}

}  // namespace lockstep

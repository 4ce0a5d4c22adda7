#include "group_options.hpp"

#include <c10/util/Type.h>
#include <lockstep/base/error.hpp>
#include <nlohmann/json.hpp>

#include "archives.hpp"
#include "base/number_text.hpp"

#include <cmath>
#include <typeinfo>
#include <utility>
#include <vector>

namespace lockstep {
namespace {

using nlohmann::json;
using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

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

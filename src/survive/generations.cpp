#include "generations.hpp"

#include <nlohmann/json.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "comm/meeting/meeting.hpp"
#include "comm/meeting/stored.hpp"

#include <algorithm>

namespace lockstep::comm {
namespace {

const std::string kNewest = "newest";
const std::string kTakesPart = "takes_part";
const std::string kFolder = "folder";

std::string begun_key(int generation) {
  return "begun/" + std::to_string(generation);
}

std::string left_key(int generation, int member) {
  return "left/" + std::to_string(generation) + "/" + std::to_string(member);
}

std::string heart_key(int member) {
  return "heart/" + std::to_string(member);
}

std::string generation_text(const Generation& generation) {
  return nlohmann::json{{"number", generation.number}, {"members", generation.members}, {"over", generation.over}}
      .dump();
}

Generation generation_from(const std::string& text) {
  const auto object = nlohmann::json::parse(text);
  return {object.at("number"), object.at("members"), object.at("over")};
}

}  // namespace

std::optional<int> Generation::index_of(int member) const {
  const auto found = std::find(members.begin(), members.end(), member);
  if (found == members.end()) return std::nullopt;
  return static_cast<int>(found - members.begin());
}

std::string keys_of_generation(int number) {
  return "generation-" + std::to_string(number);
}

void call_off(const StorePtr& store, const std::string& job, int generation, const Failure& failure) {
  call_off(*c10::make_intrusive<c10d::PrefixStore>(job_prefix(job) + keys_of_generation(generation), store), failure);
}

Generations::Generations(const StorePtr& store, const std::string& job)
    : store_(c10::make_intrusive<c10d::PrefixStore>(job_prefix(job) + kGenerations, store)) {}

void Generations::begin(int processes) {
  Generation first;
  for (int member = 0; member < processes; ++member) first.members.push_back(member);
  store_->set(kNewest, generation_text(first));
}

Generation Generations::newest() {
  return parse_stored(kNewest, store_->get_to_str(kNewest), generation_from);
}

Generation Generations::change(const std::function<bool(Generation&)>& change) {
  for (;;) {
    const Generation before = newest();
    Generation after = before;
    if (before.over || !change(after)) return before;
    ++after.number;
    const std::string text = generation_text(after);
    if (store_->compareSet(kNewest, generation_text(before), text) == text) return after;
  }
}

Generation Generations::lose(int member) {
  return change([&](Generation& generation) {
    const auto lost = std::erase(generation.members, member);
    generation.over = generation.members.empty();
    return lost > 0;
  });
}

Generation Generations::join(int member) {
  return change([&](Generation& generation) {
    if (generation.index_of(member) || !has_begun(generation.number)) return false;
    generation.members.push_back(member);
    return true;
  });
}

Generation Generations::end() {
  return change([](Generation& generation) { return generation.over = true; });
}

void Generations::note_beginning(int generation) {
  store_->set(begun_key(generation), std::string("yes"));
}

bool Generations::has_begun(int generation) {
  return store_->check({begun_key(generation)});
}

void Generations::beat(int member, const Heart& heart) {
  store_->set(heart_key(member), nlohmann::json{heart.beats, heart.silence.count(), heart.most.count()}.dump());
}

std::optional<Generations::Heart> Generations::heart_of(int member) {
  const std::string key = heart_key(member);
  if (!store_->check({key})) return std::nullopt;
  return parse_stored(key, store_->get_to_str(key), [](const std::string& text) {
    const auto numbers = nlohmann::json::parse(text);
    const auto time = [&](size_t index) { return std::chrono::milliseconds(numbers.at(index).get<int64_t>()); };
    return Heart{numbers.at(0), time(1), time(2)};
  });
}

void Generations::take_part(const std::string& folder) {
  if (!folder.empty()) store_->set(kFolder, folder);
  store_->set(kTakesPart, std::string("yes"));
}

bool Generations::takes_part() {
  return store_->check({kTakesPart});
}

std::string Generations::folder() {
  return store_->check({kFolder}) ? store_->get_to_str(kFolder) : "";
}

void Generations::leave(int generation, int member) {
  store_->set(left_key(generation, member), std::string("yes"));
}

Generation Generations::keep_those_who_left(int number) {
  return change([&](Generation& generation) {
    if (generation.number != number) return false;
    std::erase_if(generation.members, [&](int member) { return !store_->check({left_key(number, member)}); });
    return true;
  });
}

}  // namespace lockstep::comm

#include "stored_values.hpp"

#include <lockstep/base/error.hpp>

#include "stored.hpp"

#include <algorithm>
#include <cstdint>
#include <exception>

namespace lockstep::comm {
namespace {

void check_question(bool is_right) {
  if (!is_right) throw Error("the store does not know this question");
}

}  // namespace

Fields StoredValues::answer(const Fields& question) {
  try {
    check_question(!question.empty());
    Fields answer = answer_of(question[0], question);
    answer.insert(answer.begin(), "ok");
    return answer;
  } catch (const std::exception& error) {
    return {"no", error.what()};
  }
}

Fields StoredValues::answer_of(const std::string& what, const Fields& question) {
  const size_t count = question.size();
  Fields answer;
  if (what == "set") {
    check_question(count % 2 == 1);
    for (size_t i = 1; i < count; i += 2) values_[question[i]] = question[i + 1];
  } else if (what == "get") {
    for (size_t i = 1; i < count; ++i) {
      const auto found = values_.find(question[i]);
      answer.push_back(found == values_.end() ? "" : "=" + found->second);
    }
  } else if (what == "check") {
    const bool all =
        std::all_of(question.begin() + 1, question.end(), [&](auto& key) { return values_.contains(key); });
    answer.emplace_back(all ? "yes" : "no");
  } else if (what == "add") {
    check_question(count == 3);
    answer.push_back(add(question[1], question[2]));
  } else if (what == "compare") {
    check_question(count == 4);
    answer.push_back(compare(question[1], question[2], question[3]));
  } else if (what == "append") {
    check_question(count == 3);
    values_[question[1]] += question[2];
  } else if (what == "delete") {
    check_question(count == 2);
    answer.emplace_back(values_.erase(question[1]) > 0 ? "yes" : "no");
  } else {
    check_question(what == "count");
    answer.push_back(std::to_string(values_.size()));
  }
  return answer;
}

std::string StoredValues::add(const std::string& key, const std::string& number) {
  const auto found = values_.find(key);
  const int64_t before = found == values_.end() ? 0 : parse_stored(key, found->second, number_in);
  return values_[key] = std::to_string(before + number_in(number));
}

std::string StoredValues::compare(const std::string& key, const std::string& before, const std::string& after) {
  const auto found = values_.find(key);
  if (found == values_.end() && !before.empty()) return before;
  if (found != values_.end() && found->second != before) return found->second;
  return values_[key] = after;
}

}  // namespace lockstep::comm

#include "failure.hpp"

#include <nlohmann/json.hpp>

#include "base/exception_text.hpp"

#include <vector>

namespace lockstep::comm {

using nlohmann::json;

void Failure::raise() const {
  if (is(Error::stopped)) throw Stopped(text);
  throw Error(text, data);
}

Failure failure_of(const std::exception_ptr& exception) {
  return {exception_text(exception), data_of(exception)};
}

std::string to_stored(const Failure& failure) {
  const auto& [cause, ranks, options] = failure.data;
  return json{{"text", failure.text}, {"cause", cause}, {"ranks", ranks}, {"options", options}}.dump(
      -1, ' ', false, json::error_handler_t::replace);
}

Failure failure_from(const std::string& stored) {
  try {
    const auto values = json::parse(stored);
    return {values.at("text"),
            {values.at("cause").get<Error::Cause>(), values.at("ranks").get<std::vector<int>>(),
             values.at("options").get<std::vector<std::string>>()}};
  } catch (const json::exception&) {
    return {stored, {Error::machine}};
  }
}

}  // namespace lockstep::comm

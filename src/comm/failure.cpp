#include "failure.hpp"

#include <lockstep/base/error.hpp>

#include "base/exception_text.hpp"

#include <array>
#include <string_view>

namespace lockstep::comm {
namespace {

// An error's text begins with the name of a rank or a process, and so with none of these.
constexpr std::array kMarks{std::pair{Failure::Kind::stop, std::string_view("stop: ")},
                            std::pair{Failure::Kind::death, std::string_view("death: ")},
                            std::pair{Failure::Kind::late, std::string_view("late: ")}};

}  // namespace

void Failure::raise() const {
  if (kind == Failure::Kind::stop) throw Stopped(text);
  if (kind == Failure::Kind::death) throw ProcessDied(text);
  if (kind == Failure::Kind::late) throw TimedOut(text);
  throw Error(text);
}

Failure failure_of(const std::exception_ptr& exception) {
  try {
    std::rethrow_exception(exception);
  } catch (const Stopped& stopped) {
    return {stopped.what(), Failure::Kind::stop};
  } catch (const ProcessDied& died) {
    return {died.what(), Failure::Kind::death};
  } catch (const TimedOut& late) {
    return {late.what(), Failure::Kind::late};
  } catch (...) {
    return exception_text(exception);
  }
}

std::string to_stored(const Failure& failure) {
  for (const auto& [kind, mark] : kMarks) {
    if (kind == failure.kind) return std::string(mark) + failure.text;
  }
  return failure.text;
}

Failure failure_from(const std::string& stored) {
  for (const auto& [kind, mark] : kMarks) {
    if (stored.starts_with(mark)) return {stored.substr(mark.size()), kind};
  }
  return stored;
}

}  // namespace lockstep::comm

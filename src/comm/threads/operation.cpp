#include "operation.hpp"

#include "base/classic.hpp"

namespace lockstep::comm {

Operation::Operation(const Members& of, uint64_t number) : of_(of), place_(number) {
  members_.reserve(of.size());
  for (int rank = 0; rank < of.size(); ++rank) members_.push_back({rank});
}

Operation::Operation(const Members& of, const Side& side) : of_(of), place_(side) {
  // The receiver comes first: a receive from any rank may change the sender while the receiver looks itself up.
  members_.push_back({side.destination});
  members_.push_back({side.source});
}

void Operation::set_source(int rank) {
  std::get<Side>(place_).source = rank;
  members_[1].rank = rank;
}

const Call& Operation::call(int rank) const {
  return const_cast<Operation*>(this)->member(rank).call;
}

Operation::Member& Operation::member(int rank) {
  if (std::holds_alternative<uint64_t>(place_)) return members_[rank];
  return members_[0].rank == rank ? members_[0] : members_[1];
}

std::string Operation::where(int rank) const {
  return call(rank).signature.text() + " (" + title() + ")";
}

std::string Operation::title() const {
  if (const auto* number = std::get_if<uint64_t>(&place_)) return classic_text("collective call ", *number, of_.text());
  const auto& side = std::get<Side>(place_);
  const std::string source = side.source == kAnySource ? "any rank" : std::to_string(side.source);
  return classic_text("message ", source, " -> ", side.destination, ", tag ", side.tag, of_.text());
}

}  // namespace lockstep::comm

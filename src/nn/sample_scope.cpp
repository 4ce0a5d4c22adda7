#include <lockstep/nn/sample_scope.hpp>

#include <utility>

namespace lockstep {
namespace {

SampleScope*& innermost() {
  static thread_local SampleScope* innermost = nullptr;
  return innermost;
}

}  // namespace

SampleScope::SampleScope(const SampleScope::Place& place) : SampleScope(Kept{.place = place}) {}

SampleScope::SampleScope(Kept kept) : state_(std::move(kept)), before_(innermost()) {
  innermost() = this;
}

SampleScope::~SampleScope() {
  innermost() = before_;
}

SampleScope* SampleScope::current() {
  return innermost();
}

SampleScope::Kept SampleScope::keep() {
  return innermost() == nullptr ? Kept{.place = {.first = -1}} : innermost()->state_;
}

SampleScope::Draw SampleScope::draw(const void* layer) {
  auto& draws = state_.draws;
  auto& next = draws.try_emplace(layer, Draw{.layer = static_cast<int64_t>(draws.size())}).first->second;
  const Draw now = next;
  ++next.call;
  return now;
}

}  // namespace lockstep

#include <lockstep/nn/sample_scope.hpp>

#include <utility>

namespace lockstep {
namespace {

thread_local SampleScope* innermost_sample_scope = nullptr;

}  // namespace

SampleScope::SampleScope(const SampleScope::Place& place) : SampleScope(Kept{.place = place}) {}

SampleScope::SampleScope(Kept kept) : state_(std::move(kept)), before_(innermost_sample_scope) {
  innermost_sample_scope = this;
}

SampleScope::~SampleScope() {
  innermost_sample_scope = before_;
}

SampleScope* SampleScope::current() {
  return innermost_sample_scope;
}

SampleScope::Kept SampleScope::keep() {
  return innermost_sample_scope == nullptr ? Kept{.place = {.first = -1}} : innermost_sample_scope->state_;
}

SampleScope::Draw SampleScope::draw(const void* layer) {
  auto& draws = state_.draws;
  auto& next = draws.try_emplace(layer, Draw{.layer = static_cast<int64_t>(draws.size())}).first->second;
  const Draw now = next;
  ++next.call;
  return now;
}

}  // namespace lockstep

#include <lockstep/models/sample_scope.hpp>

namespace lockstep {
namespace {

SampleScope*& innermost() {
  static thread_local SampleScope* innermost = nullptr;
  return innermost;
}

}  // namespace

SampleScope::SampleScope(const SamplePlace& place) : place_(place), before_(innermost()) {
  innermost() = this;
}

SampleScope::~SampleScope() {
  innermost() = before_;
}

SampleScope* SampleScope::current() {
  return innermost();
}

SampleScope::Draw SampleScope::draw(const void* layer) {
  auto& next = draws_.try_emplace(layer, Draw{.layer = static_cast<int64_t>(draws_.size())}).first->second;
  const Draw now = next;
  ++next.call;
  return now;
}

}  // namespace lockstep

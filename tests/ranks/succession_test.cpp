// run() with a Succession: once for each generation, until there is no other one.
#include <gmock/gmock.h>
#include <lockstep/base/error.hpp>
#include <lockstep/ranks/rank.hpp>

#include "comm/failure.hpp"
#include "ranks/succession.hpp"

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace lockstep {
namespace succession_test {

using testing::ElementsAre;

using Calls = std::vector<std::string>;
const Devices kOneDevice{c10::kCPU};

class Noted : public Succession {
 public:
  explicit Noted(Calls& calls) : calls_(calls) { calls_.push_back("begins"); }
  ~Noted() override { calls_.push_back("ends"); }
  bool enter() override {
    calls_.push_back("enter");
    return generation_++ < 3;
  }
  void leave() override { calls_.push_back("leave"); }
  bool goes_on() override {
    calls_.push_back("goes on?");
    return generation_ < 2;
  }

 private:
  Calls& calls_;
  int generation_ = 0;
};

RunOptions noted_in(Calls& calls) {
  return {.succession = [&](const Devices&, const RunOptions&) { return std::make_shared<Noted>(calls); }};
}

TEST(Succession, AnotherGenerationFollowsWhenItSaysSo) {
  Calls calls;
  run(
      kOneDevice, [&](Rank&) { calls.push_back("body"); }, noted_in(calls));
  EXPECT_THAT(calls, ElementsAre("begins", "enter", "body", "goes on?", "enter", "body", "goes on?", "ends"));
}

TEST(Succession, ALostProcessEndsAGenerationAndOtherErrorsEndTheRun) {
  Calls calls;
  const auto body = [&](Rank&) {
    if (calls.size() < 3) throw Error("process 1 is gone", {Error::death});
    throw std::runtime_error("thrown by the test");
  };
  EXPECT_THROW(run(kOneDevice, body, noted_in(calls)), Error);
  EXPECT_THAT(calls, ElementsAre("begins", "enter", "leave", "enter", "ends"));
}

TEST(Succession, ItEndsTheRunWhenNoGenerationIsLeft) {
  Calls calls;
  int bodies = 0;
  run(
      kOneDevice,
      [&](Rank&) {
        ++bodies;
        throw Error("process 1 is gone", {Error::death});
      },
      noted_in(calls));
  EXPECT_EQ(bodies, 3);
}

TEST(Succession, ARunWithinABodyHasNone) {
  Calls calls;
  run(kOneDevice, [&](Rank&) {
    run(
        kOneDevice, [](Rank&) {}, noted_in(calls));
  });
  EXPECT_TRUE(calls.empty());
}

}  // namespace succession_test
}  // namespace lockstep

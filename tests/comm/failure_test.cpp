// Failure: what kind of end it is survives the store, and decides what is thrown.
#include "comm/failure.hpp"

#include <gtest/gtest.h>
#include <lockstep/base/error.hpp>

#include <exception>
#include <stdexcept>

namespace failure_test {

using lockstep::comm::Failure;

TEST(Failure, ComesBackFromTheStoreAsItWas) {
  for (const auto kind : {Failure::Kind::error, Failure::Kind::stop, Failure::Kind::death}) {
    const Failure failure{"rank 1 (cpu): so it is", kind};
    const Failure back = lockstep::comm::failure_from(to_stored(failure));
    EXPECT_EQ(back.text, failure.text);
    EXPECT_EQ(back.kind, kind);
  }
  EXPECT_EQ(lockstep::comm::to_stored({"rank 1 (cpu): out of luck"}), "rank 1 (cpu): out of luck");
  EXPECT_TRUE(lockstep::comm::failure_from("").empty());
}

TEST(Failure, ThrowsStoppedForAStopAlone) {
  EXPECT_THROW(Failure("over", Failure::Kind::stop).raise(), lockstep::Stopped);
  for (const auto kind : {Failure::Kind::error, Failure::Kind::death}) {
    try {
      Failure("over", kind).raise();
    } catch (const lockstep::Stopped&) {
      FAIL() << "it was no stop";
    } catch (const lockstep::Error& error) {
      EXPECT_STREQ(error.what(), "over");
    }
  }
}

TEST(Failure, KnowsAStopByItsType) {
  EXPECT_EQ(lockstep::comm::failure_of(std::make_exception_ptr(lockstep::Stopped("over"))).kind, Failure::Kind::stop);
  EXPECT_EQ(lockstep::comm::failure_of(std::make_exception_ptr(lockstep::Error("stopped by request"))).kind,
            Failure::Kind::error);
  EXPECT_EQ(lockstep::comm::failure_of(std::make_exception_ptr(std::runtime_error("over"))).text, "over");
}

}  // namespace failure_test

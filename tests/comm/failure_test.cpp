// Failure: an error's data survive the store, and decide what is thrown.
#include "comm/failure.hpp"

#include <gmock/gmock.h>
#include <lockstep/base/error.hpp>

#include <exception>
#include <new>
#include <stdexcept>

namespace failure_test {

using lockstep::Error;
using lockstep::comm::Failure;
using testing::ElementsAre;

TEST(Failure, ComesBackFromTheStoreAsItWas) {
  for (const auto cause : {Error::refused, Error::file, Error::death, Error::stopped}) {
    const Failure failure{"rank 1 (cpu): so \"it\"\nis", {cause, {1, 3}, {"grain"}}};
    const Failure back = lockstep::comm::failure_from(to_stored(failure));
    EXPECT_EQ(back.text, failure.text);
    EXPECT_TRUE(back.is(cause));
    EXPECT_THAT(back.data.ranks, ElementsAre(1, 3));
    EXPECT_THAT(back.data.options, ElementsAre("grain"));
  }
}

TEST(Failure, ATextOfAStrangersIsShownUnchanged) {
  for (const char* const foreign : {"hello", "{", "{\"text\":7}", "[]"}) {
    EXPECT_EQ(lockstep::comm::failure_from(foreign).text, foreign);
    EXPECT_TRUE(lockstep::comm::failure_from(foreign).is(Error::machine));
  }
  EXPECT_TRUE(lockstep::comm::failure_from("").empty());
}

TEST(Failure, ThrowsStoppedForAStopAlone) {
  EXPECT_THROW(Failure("over", {Error::stopped}).raise(), lockstep::Stopped);
  try {
    Failure("over", {Error::death, {2}}).raise();
  } catch (const lockstep::Stopped&) {
    FAIL() << "it was no stop";
  } catch (const Error& error) {
    EXPECT_EQ(lockstep::comm::failure_of(std::current_exception()).text, "over");
    EXPECT_EQ(error.cause(), Error::death);
    EXPECT_THAT(error.ranks(), ElementsAre(2));
  }
}

TEST(Failure, HasTheCauseOfItsException) {
  const auto cause_of = [](const auto& exception) {
    return lockstep::comm::failure_of(std::make_exception_ptr(exception)).data.cause;
  };
  EXPECT_EQ(cause_of(lockstep::Stopped("over")), Error::stopped);
  EXPECT_EQ(cause_of(Error("stopped by request")), Error::refused);  // in words alone
  EXPECT_EQ(cause_of(std::runtime_error("over")), Error::user_code);
  EXPECT_EQ(cause_of(std::bad_alloc()), Error::machine);
  EXPECT_EQ(lockstep::comm::failure_of(std::make_exception_ptr(std::runtime_error("over"))).text, "over");
}

}  // namespace failure_test

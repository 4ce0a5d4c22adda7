// Labels: concurrency processes
// Members of a group that prove to each other that they know the job's key. Strangers who say other things, or nothing,
// are strangers_test.cpp's.
#include "comm/processes/proven_group.hpp"

#include <gmock/gmock.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "comm/job_key.hpp"
#include "support/error_of.hpp"
#include "support/time_limits.hpp"

#include <chrono>
#include <stop_token>
#include <string>
#include <thread>
#include <vector>

namespace proven_group_test {

using namespace lockstep;
using namespace std::chrono_literals;
using testing::AllOf;
using testing::Each;
using testing::HasSubstr;

// Each member's error; "(no error)" once its barrier has ended.
std::vector<std::string> errors_of_members(const std::vector<comm::JobKey>& keys) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const int size = static_cast<int>(keys.size());
  std::vector<std::string> names, errors(size);
  for (int rank = 0; rank < size; ++rank) names.push_back("rank " + std::to_string(rank));
  {
    std::vector<std::jthread> members;
    for (int rank = 0; rank < size; ++rank) {
      members.emplace_back([&, rank] {
        errors[rank] = any_error_of([&] {
          const comm::GroupPlace place{store, rank, size, kSlowdown * 20s};
          const auto group = comm::make_proven_group(
              {place, "127.0.0.1", keys[rank], "the group", names, std::chrono::seconds(5)}, {});
          group.backend->barrier()->wait();
        });
      });
    }
  }
  return errors;
}

TEST(ProvenGroup, OfMembersWithOneKeyComesAbout) {
  const auto key = comm::HandedKey().key();
  EXPECT_THAT(errors_of_members({key, key, key}), Each("(no error)"));
}

TEST(ProvenGroup, IsNotMadeWithAMemberOfAnotherKey) {
  const auto key = comm::HandedKey().key();
  EXPECT_THAT(errors_of_members({key, comm::HandedKey().key(), key}),
              Each(AllOf(HasSubstr("could not connect in 4 tries"), HasSubstr("does not know the job's key"))));
}

}  // namespace proven_group_test

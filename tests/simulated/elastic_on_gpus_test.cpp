// Labels: simulated processes repeated
// An elastic job on GPUs, over NCCL: killed processes change neither the weights nor the metrics.
#include "comm/processes/elastic_fixture.hpp"

namespace elastic_on_gpus_test {

using namespace lockstep;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

class ElasticOnGpus : public Elastic {
 protected:
  // Three processes on a GPU each.
  Words job_on_gpus(const std::string& name, const Words& more) const {
    return job_of(3, {}, Words{from_environment("LOCKSTEP_PROGRAM")} + settings(name, "cuda:0,cuda:1,cuda:2") + more);
  }
};

TEST_F(ElasticOnGpus, KillsChangeNoBit) {
  Program killed(job_on_gpus("killed", {"--epochs", "12"}), watched());
  ASSERT_TRUE(killed.wait_for("epoch  2/12"));
  kill_member(1);
  ASSERT_TRUE(killed.wait_for("process 3 has joined"));
  kill_member(0);  // who keeps the run
  kill_member(2);  // the successor alone is left, and takes no GPU of the others
  ASSERT_TRUE(killed.wait_for("process 4 has joined"));
  kill_member(3);
  const auto ended = killed.finish();
  ASSERT_EQ(ended.code, 0) << ended.err << ended.out;
  EXPECT_THAT(ended.err, AllOf(HasSubstr("process 0 was ended by signal 9"), Not(HasSubstr("error:"))));

  auto itself = watched();
  itself.starts_itself = true;  // this test has no GPUs
  const auto peace = run_program(settings("undisturbed", "cuda:0") + Words{"--epochs", "12"}, itself);
  ASSERT_EQ(peace.code, 0) << peace.err;
  expect_same_epochs("killed", 12);
}

TEST_F(ElasticOnGpus, ALoopOfOnesOwnIsRefused) {
  const Words loop = {from_environment("LOCKSTEP_NCCL_PROGRAM"), "own_loop", "cuda:0,cuda:1", "net.safetensors"};
  const auto refused = run_program(job_of(2, {}, loop), watched());
  EXPECT_NE(refused.code, 0);
  EXPECT_THAT(refused.err, HasSubstr("run: `elastic` is for CPU ranks"));
}

}  // namespace elastic_on_gpus_test

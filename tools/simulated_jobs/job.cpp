// Each simulated process has a job of its own, in the place of src/comm/processes/this_job.cpp.
#include "comm/processes/job.hpp"

#include "job_of_process.hpp"

namespace lockstep {

simulation::Jobs& simulation::jobs() {
  static Jobs jobs;
  return jobs;
}

comm::Job& comm::Job::of_this_process() {
  auto& job = simulation::jobs()[simulation::Scheduler::this_thread()->process];
  if (!job) job = std::make_shared<Job>();
  return *job;
}

}  // namespace lockstep

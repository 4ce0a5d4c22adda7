// Leftovers: what a job has left on the machine after its end.
#pragma once

#include "job.hpp"

#include "comm/meeting/job_store.hpp"

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <set>
#include <string>
#include <vector>

namespace lockstep {

class Leftovers {
 public:
  // For the environment of the job's processes: a mark by which they are found, and a temporary folder of the job.
  Words variables() const { return {mark_, "TMPDIR=" + temporaries_.path().string()}; }

  // Whether the process has the mark, or is in one of these sessions. Zombies do not count.
  bool is_of_job(pid_t pid, const std::set<pid_t>& sessions = {}) const {
    if (pid <= 0 || state_of(pid) == 'Z') return false;
    if (sessions.contains(getsid(pid))) return true;
    std::ifstream file("/proc/" + std::to_string(pid) + "/environ", std::ios::binary);
    const std::string environment{std::istreambuf_iterator<char>(file), {}};
    return environment.find(mark_) != std::string::npos;
  }

  // Processes, those of these ports that answer, files in the temporary folder and in /dev/shm.
  Words found(const std::set<pid_t>& sessions, const Words& ports) const {
    Words found;
    std::error_code error;
    for (const auto& entry : std::filesystem::directory_iterator("/proc", error)) {
      const int pid = std::atoi(entry.path().filename().c_str());
      if (is_of_job(pid, sessions)) found.push_back("process " + std::to_string(pid));
    }
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(1);
    for (const auto& port : ports) {
      if (comm::answers("127.0.0.1", std::stoi(port), deadline)) found.push_back("port " + port);
    }
    for (const auto& name : temporaries_.names()) found.push_back(name + " in the temporary folder");
    for (const auto& name : shared_memory()) {
      if (!shared_before_.contains(name)) found.push_back(name + " in /dev/shm");
    }
    return found;
  }

 private:
  // Gives the names that LibTorch or this project would make; other programs of the machine have others, and other
  // tests have scratch folders.
  static std::set<std::string> shared_memory() {
    std::set<std::string> names;
    std::error_code error;
    for (const auto& entry : std::filesystem::directory_iterator("/dev/shm", error)) {
      const std::string name = entry.path().filename();
      if (name.starts_with("lockstep-test-")) continue;
      if (name.find("torch") != name.npos || name.find("lockstep") != name.npos) names.insert(name);
    }
    return names;
  }

  const ScratchFolder temporaries_;
  const std::string mark_ = "LOCKSTEP_TEST_JOB=" + temporaries_.path().string();
  const std::set<std::string> shared_before_ = shared_memory();
};

}  // namespace lockstep

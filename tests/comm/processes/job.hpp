// Jobs: the program of the process tests, started once or by a launcher.
#pragma once

#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/base/error.hpp>

#include "cli/program.hpp"
#include "io/safetensors.hpp"
#include "support/error_data.hpp"
#include "support/free_port.hpp"
#include "support/scratch_folder.hpp"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

namespace lockstep {

using Words = std::vector<std::string>;

inline std::string ranks_program() {
  return from_environment("LOCKSTEP_RANKS_PROGRAM");
}

// The file that a command's name means; empty if there is none.
inline std::string find_program(const std::string& name) {
  std::istringstream folders(from_environment("PATH"));
  for (std::string folder; std::getline(folders, folder, ':');) {
    const auto file = std::filesystem::path(folder) / name;
    if (access(file.c_str(), X_OK) == 0) return file;
  }
  return "";
}

// The environment has what finds programs, and nothing of a launcher.
inline Surroundings surroundings_with(const Words& variables = {}) {
  Surroundings surroundings;
  surroundings.environment = {"PATH=" + from_environment("PATH"), "LC_ALL=C.UTF-8", "OMP_NUM_THREADS=1"};
  if (std::getenv("HOME") != nullptr) surroundings.environment.push_back("HOME=" + from_environment("HOME"));
  for (const auto& variable : variables) surroundings.environment.push_back(variable);
  return surroundings;
}

inline Words operator+(Words first, const Words& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

// Matches what processes print: this one failed, or the first `processes` did. Without ranks any may be at fault.
inline auto FailsIn(int process, Error::Cause cause, std::vector<int> ranks = {}) {
  return testing::HasSubstr("process " + std::to_string(process) + ": cause " + data_text({cause, std::move(ranks)}));
}
inline auto AllFail(int processes, Error::Cause cause, const std::vector<int>& ranks = {}) {
  std::vector<testing::Matcher<std::string>> each;
  for (int process = 0; process < processes; ++process) each.push_back(FailsIn(process, cause, ranks));
  return testing::AllOfArray(each);
}

// lockstep launch -n PROCESSES process_ranks WORDS
inline Words launch(int processes, const Words& words) {
  return Words{"launch", "-n", std::to_string(processes), ranks_program()} + words;
}

// `lockstep launch -n 2` of a program whose process 1 does something else instead.
inline Words with_rank_1_doing(const std::string& what, const Words& program) {
  return Words{"launch", "-n", "2", "sh", "-c", "test $RANK != 1 || " + what + "; exec \"$0\" \"$@\""} + program;
}

inline Finished run_launched(int processes, const Words& words, const Words& variables = {}) {
  return run_program(launch(processes, words), surroundings_with(variables));
}

// Started once, without a launcher unless `variables` look like one.
inline Finished run_alone(const Words& words, const Words& variables = {}) {
  auto surroundings = surroundings_with(variables);
  surroundings.program = ranks_program();
  return run_program(words, surroundings);
}

// Variables of torchrun, for one of `processes` without a launcher.
inline Words as_rank(int rank, int processes, const std::string& port, const std::string& patience) {
  return {"RANK=" + std::to_string(rank),
          "WORLD_SIZE=" + std::to_string(processes),
          "LOCAL_RANK=" + std::to_string(rank),
          "LOCAL_WORLD_SIZE=" + std::to_string(processes),
          "MASTER_PORT=" + port,
          "MASTER_ADDR=127.0.0.1",
          "LOCKSTEP_RENDEZVOUS_TIMEOUT=" + patience};
}

// The number of the process that wrote it into a file.
inline pid_t pid_in(const std::filesystem::path& file) {
  pid_t pid = -1;
  std::ifstream(file) >> pid;
  return pid;
}

inline void expect_all_ok(const Finished& job, int processes) {
  EXPECT_EQ(job.code, 0) << job.err << job.out;
  for (int process = 0; process < processes; ++process) {
    EXPECT_THAT(job.out, testing::HasSubstr("process " + std::to_string(process) + ": ok\n"));
  }
}

// The largest difference between two kept networks.
inline double difference(const std::filesystem::path& a, const std::filesystem::path& b) {
  const auto left = io::read_safetensors(a), right = io::read_safetensors(b);
  EXPECT_EQ(left.size(), right.size());
  double largest = 0;
  for (size_t i = 0; i < std::min(left.size(), right.size()); ++i) {
    EXPECT_EQ(left[i].first, right[i].first);
    largest = std::max(largest, (left[i].second - right[i].second).abs().max().item<double>());
  }
  return largest;
}

}  // namespace lockstep

// What limits the CPU work of this process: its affinity mask, and its cgroup's CPU quota.
//
// The folders are parameters so that a test can show other machines than its own. Linux only. Never throws: what cannot
// be read does not limit.
#pragma once

#include <filesystem>
#include <limits>
#include <vector>

namespace lockstep {

// The logical CPUs that this thread may run on.
std::vector<int> affinity_cpus();

// Physical cores among the logical CPUs `cpus`: two hyperthreads of one core count once. A CPU whose topology cannot be
// read counts as a core.
int physical_cores(const std::vector<int>& cpus, const std::filesystem::path& sys_cpu = "/sys/devices/system/cpu");

constexpr double no_quota = std::numeric_limits<double>::infinity();

// CPUs' worth of time that the cgroup allows, version 2 (cpu.max) or 1 (cpu.cfs_quota_us): the smallest quota on the
// way from this process's group up to the root. 1.5 means one and a half CPUs.
double cpu_quota(const std::filesystem::path& cgroups = "/sys/fs/cgroup",
                 const std::filesystem::path& self = "/proc/self/cgroup");

}  // namespace lockstep

// Reads the limits of this process's work on the CPU: its affinity mask, and the CPU quota of the cgroup.
//
// The folders are parameters, so that a test can show other machines than its own. Linux only. No function here throws:
// a limit that cannot be read counts as none.
#pragma once

#include <filesystem>
#include <limits>
#include <string>
#include <vector>

namespace lockstep {

// Lists the logical CPUs that this thread may run on. OMP_PROC_BIND, OMP_PLACES or GOMP_CPU_AFFINITY make OpenMP bind
// the thread that loads it to the first place. Then all places count, which together are the mask before.
std::vector<int> affinity_cpus();

// Tells whether OpenMP binds its threads. Then a thread that lets several threads compute is bound too.
bool openmp_binds_threads();

// While a FreeOfOpenMp lives, its thread may run on all of affinity_cpus(). So may all that it starts.
class FreeOfOpenMp {
 public:
  FreeOfOpenMp();
  ~FreeOfOpenMp();
  FreeOfOpenMp& operator=(FreeOfOpenMp&&) = delete;

 private:
  std::vector<int> before_;  // the thread's CPUs before; empty if they were not changed
};

// Counts the physical cores among the logical CPUs `cpus`: two hyperthreads of one core count once. A CPU whose
// topology cannot be read counts as a core.
int physical_cores(const std::vector<int>& cpus, const std::filesystem::path& sys_cpu = "/sys/devices/system/cpu");

// Gives the CPU's name, as the kernel has it; empty if the kernel has none.
std::string cpu_name();

// Says how many of the cores among `cpus` may be used at once, for people: "2", "2 (4 hyperthreads)" where cores have
// several, "1 of 2 (4 hyperthreads)" where a quota leaves fewer.
std::string text_of_cores(int usable, const std::vector<int>& cpus,
                          const std::filesystem::path& sys_cpu = "/sys/devices/system/cpu");

constexpr double no_quota = std::numeric_limits<double>::infinity();

// Gives the CPUs' worth of time that the cgroup allows: 1.5 means one and a half CPUs. Reads version 2 (cpu.max) or 1
// (cpu.cfs_quota_us). The smallest quota on the way from this process's group up to the root counts.
double cpu_quota(const std::filesystem::path& cgroups = "/sys/fs/cgroup",
                 const std::filesystem::path& self = "/proc/self/cgroup");

}  // namespace lockstep

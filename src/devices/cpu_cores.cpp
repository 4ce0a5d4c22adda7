#include "cpu_cores.hpp"

#include <dlfcn.h>
#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <set>
#include <utility>

#include "base/classic.hpp"

namespace lockstep {

namespace fs = std::filesystem;

namespace {

std::vector<int> mask_of_this_thread() {
  for (int capacity = 1024; capacity <= 1 << 20; capacity *= 2) {  // the kernel refuses a mask smaller than its own
    cpu_set_t* mask = CPU_ALLOC(capacity);
    const size_t bytes = CPU_ALLOC_SIZE(capacity);
    CPU_ZERO_S(bytes, mask);
    const bool read = sched_getaffinity(0, bytes, mask) == 0;
    const bool too_small = !read && errno == EINVAL;
    std::vector<int> cpus;
    for (int cpu = 0; read && cpu < capacity; ++cpu) {
      if (CPU_ISSET_S(cpu, bytes, mask)) cpus.push_back(cpu);
    }
    CPU_FREE(mask);
    if (!too_small) return cpus;
  }
  return {};
}

void set_mask_of_this_thread(const std::vector<int>& cpus) {
  const int capacity = cpus.back() + 1;
  cpu_set_t* mask = CPU_ALLOC(capacity);
  const size_t bytes = CPU_ALLOC_SIZE(capacity);
  CPU_ZERO_S(bytes, mask);
  for (const int cpu : cpus) CPU_SET_S(cpu, bytes, mask);
  sched_setaffinity(0, bytes, mask);
  CPU_FREE(mask);
}

// Gives the places where OpenMP may put its threads; none if there is no OpenMP, or if it binds no threads. LibTorch
// brings some OpenMP, which is asked by name, so that we link none.
std::vector<std::vector<int>> places_of_openmp() {
  const auto ask = [](const char* name) { return dlsym(RTLD_DEFAULT, name); };
  const auto places = reinterpret_cast<int (*)()>(ask("omp_get_num_places"));
  const auto size_of = reinterpret_cast<int (*)(int)>(ask("omp_get_place_num_procs"));
  const auto read = reinterpret_cast<void (*)(int, int*)>(ask("omp_get_place_proc_ids"));
  if (places == nullptr || size_of == nullptr || read == nullptr) return {};
  std::vector<std::vector<int>> all;
  for (int place = 0; place < places(); ++place) {
    auto& cpus = all.emplace_back(size_of(place));
    read(place, cpus.data());
    std::sort(cpus.begin(), cpus.end());
  }
  return all;
}

double quota_of(const fs::path& group) {
  double quota = 0;
  double period = 0;
  const bool version2 =
      static_cast<bool>(Classic<std::ifstream>(group / "cpu.max") >> quota >> period);  // "max" is no number
  const bool version1 = !version2 && Classic<std::ifstream>(group / "cpu.cfs_quota_us") >> quota &&
                        Classic<std::ifstream>(group / "cpu.cfs_period_us") >> period;
  if ((!version2 && !version1) || quota <= 0 || period <= 0) return no_quota;  // version 1 writes -1 for none
  return quota / period;
}

// Takes the smallest quota of the folders on the way to the root. In a container the group's path may be the host's;
// then only the folders that exist here count.
double smallest_quota(const fs::path& root, const std::string& group) {
  double quota = quota_of(root);
  fs::path folder = root;
  for (const fs::path& name : fs::path(group).relative_path()) {
    folder /= name;
    quota = std::min(quota, quota_of(folder));
  }
  return quota;
}

}  // namespace

std::vector<int> affinity_cpus() {
  const std::vector<int> mask = mask_of_this_thread();
  const auto places = places_of_openmp();
  if (std::find(places.begin(), places.end(), mask) == places.end()) return mask;
  std::set<int> cpus;
  for (const auto& place : places) cpus.insert(place.begin(), place.end());
  return {cpus.begin(), cpus.end()};
}

bool openmp_binds_threads() {
  return places_of_openmp().size() > 1;
}

FreeOfOpenMp::FreeOfOpenMp() {
  const auto before = mask_of_this_thread();
  const auto cpus = affinity_cpus();
  if (cpus == before) return;
  before_ = before;
  set_mask_of_this_thread(cpus);
}

FreeOfOpenMp::~FreeOfOpenMp() {
  if (!before_.empty()) set_mask_of_this_thread(before_);
}

int physical_cores(const std::vector<int>& cpus, const fs::path& sys_cpu) {
  std::set<std::pair<int, int>> cores;  // (package, core)
  int unknown = 0;
  for (int cpu : cpus) {
    const fs::path topology = sys_cpu / ("cpu" + std::to_string(cpu)) / "topology";
    int package = 0;
    int core = 0;
    if (Classic<std::ifstream>(topology / "physical_package_id") >> package &&
        Classic<std::ifstream>(topology / "core_id") >> core) {
      cores.emplace(package, core);
    } else {
      ++unknown;
    }
  }
  return static_cast<int>(cores.size()) + unknown;
}

std::string cpu_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(": ");
    if (line.starts_with("model name") && colon != std::string::npos) return line.substr(colon + 2);
  }
  return "";
}

std::string text_of_cores(int usable, const std::vector<int>& cpus, const fs::path& sys_cpu) {
  const int cores = physical_cores(cpus, sys_cpu);
  const auto threads = static_cast<int>(cpus.size());
  return std::to_string(usable) + (usable < cores ? " of " + std::to_string(cores) : "") +
         (threads > cores ? " (" + std::to_string(threads) + " hyperthreads)" : "");
}

double cpu_quota(const fs::path& cgroups, const fs::path& self) {
  double quota = no_quota;
  std::ifstream file(self);
  for (std::string line; std::getline(file, line);) {  // "0::/group" in version 2, "4:cpu,cpuacct:/group" in version 1
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    std::string controllers = line.substr(first, second - first + 1);
    std::replace(controllers.begin(), controllers.end(), ':', ',');
    const std::string group = line.substr(second + 1);
    if (controllers == ",,") {
      quota = std::min(quota, smallest_quota(cgroups, group));
      quota = std::min(quota, smallest_quota(cgroups / "unified", group));
    } else if (controllers.find(",cpu,") != std::string::npos) {
      quota = std::min(quota, smallest_quota(cgroups / "cpu", group));  // systemd links cpu to cpu,cpuacct
    }
  }
  return quota;
}

}  // namespace lockstep

#include "meeting.hpp"

#include <unistd.h>
#include <nlohmann/json.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "base/seconds.hpp"
#include "comm/world.hpp"
#include "devices/cuda_info.hpp"
#include "devices/processor_kind.hpp"
#include "stored.hpp"

#include <algorithm>
#include <fstream>
#include <map>
#include <thread>
#include <vector>

namespace lockstep::comm {
namespace {

using Clock = std::chrono::steady_clock;
using nlohmann::json;

constexpr auto kBetweenLooks = std::chrono::milliseconds(20);

std::string key_of(int process) {
  return "config/" + std::to_string(process);
}

std::string came_key(int process) {
  return "came/" + std::to_string(process);
}

const std::string kMet = "met";  // the key of the size of the job whose processes have met

// A job that comes later must not end the one that has met, whose processes all read the store's failure.
void leave_another_job_alone(c10d::Store& store, const LaunchEnvironment& launch) {
  if (!store.check({kMet})) return;
  const std::string size = store.get_to_str(kMet);
  if (size == std::to_string(launch.world_size)) return;
  throw NobodyMissed(launch.process_name() + ": " + another_job_text(size + " processes"));
}

std::string numbers(const std::vector<int>& list) {
  std::string text;
  for (size_t i = 0; i < list.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(list[i]);
  return text;
}

std::vector<int> absent(c10d::Store& store, int processes) {
  std::vector<int> absent;
  for (int process = 0; process < processes; ++process) {
    if (!store.check({key_of(process)})) absent.push_back(process);
  }
  return absent;
}

void wait_for_all(c10d::Store& store, const LaunchEnvironment& launch, const WaitLimit& limit) {
  const auto begin = Clock::now(), deadline = begin + limit.timeout;
  for (int next = 0; next < launch.world_size;) {
    if (store.check({key_of(next)})) {
      ++next;
      continue;
    }
    leave_another_job_alone(store, launch);
    if (store.check({"failure"})) failure_from(store.get_to_str("failure")).raise();
    limit.check(launch.process_name());
    if (Clock::now() >= deadline) {
      const auto missing = absent(store, launch.world_size);
      if (missing.empty()) return;
      throw Error(launch.process_name() + " waited " + seconds(limit.timeout) + " for " +
                      (missing.size() == 1 ? "process " : "processes ") + numbers(missing) +
                      ", which did not come to run(). " +
                      "If starting only takes long, raise LOCKSTEP_RENDEZVOUS_TIMEOUT (seconds)",
                  {Error::late});
    }
    std::this_thread::sleep_for(pause_after(Clock::now() - begin, kBetweenLooks));
  }
}

// A process leaves this for the others.
struct Introduction {
  std::string configuration, host;
  Devices devices = {};
  std::vector<std::string> gpus = {};   // GPUs by device, which are equal in all processes of a machine; "": no GPU
  std::vector<std::string> kinds = {};  // the devices' kinds (devices/processor_kind.hpp)
  std::string unshared = {};            // why ranks of this process cannot share a GPU; empty: they can

  std::string to_text() const {
    json names = json::array();
    for (const auto& device : devices) names.push_back(device.str());
    return json{{"configuration", configuration},
                {"host", host},
                {"devices", names},
                {"gpus", gpus},
                {"kinds", kinds},
                {"unshared", unshared}}
        .dump();
  }

  static Introduction from_text(const std::string& text) {
    const auto object = json::parse(text);
    Introduction read{object.at("configuration"), object.at("host")};
    for (const std::string name : object.at("devices")) read.devices.emplace_back(name);
    if (read.devices.empty()) throw Error("no devices");
    // An earlier release sends none of these, and is refused for its version.
    read.gpus = object.value("gpus", read.gpus);
    read.gpus.resize(read.devices.size());
    read.kinds = object.value("kinds", read.kinds);
    read.kinds.resize(read.devices.size());
    read.unshared = object.value("unshared", read.unshared);
    return read;
  }
};

std::vector<Introduction> read_all(c10d::Store& store, int processes) {
  std::vector<Introduction> all;
  for (int process = 0; process < processes; ++process) {
    all.push_back(parse_stored(key_of(process), store.get_to_str(key_of(process)), Introduction::from_text));
  }
  return all;
}

Roster roster_of(const std::vector<Introduction>& all) {
  Roster roster;
  for (const auto& process : all) {
    roster.by_process.push_back(process.devices);
    roster.processor_kinds.insert(roster.processor_kinds.end(), process.kinds.begin(), process.kinds.end());
  }
  return roster;
}

// Names a GPU in all processes of all machines; gives "" for other devices. Several machines may have one name.
std::string gpu(const c10::Device& device) {
  const std::string address = device.is_cuda() ? gpu_address(device.index()) : "";
  if (address.empty()) return "";
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  return address + " of " + host_name() + ", " + boot;
}

// Only Gloo, for the CPU, and NCCL connect processes.
void check_that_something_connects(const std::vector<Introduction>& all) {
  for (int process = 0; process < static_cast<int>(all.size()); ++process) {
    for (const c10::Device& device : all[process].devices) {
      if (device.is_cpu() || device.is_cuda()) continue;
      throw Error("process " + std::to_string(process) + " has a rank on " + device.str() +
                  ". Several processes can exchange tensors of the CPU and of CUDA's GPUs; ranks on other devices can "
                  "be in a run of one process");
    }
  }
}

// Tells whether ranks share a GPU, and throws Error unless NCCL lets them. Indices do not tell: if a launcher shows
// each process another GPU (CUDA_VISIBLE_DEVICES), each calls its own cuda:0.
bool share_gpus(const std::vector<Introduction>& all) {
  std::map<std::string, int> owners;
  bool shared = false;
  for (int process = 0; process < static_cast<int>(all.size()); ++process) {
    const auto& [configuration, host, devices, gpus, kinds, unshared] = all[process];
    for (size_t i = 0; i < devices.size(); ++i) {
      if (gpus[i].empty()) continue;
      const auto [owner, is_new] = owners.emplace(gpus[i], process);
      if (is_new) continue;
      const int unwilling = unshared.empty() ? owner->second : process;
      if (const std::string& why = all[unwilling].unshared; !why.empty()) {
        const bool of_one = owner->second == process;
        throw Error((of_one ? "two ranks of process " : "processes " + std::to_string(owner->second) + " and ") +
                    std::to_string(process) + (of_one ? "" : " both") + " use one GPU of " + host +
                    ", or slices of it (" + devices[i].str() + " of the second). Process " + std::to_string(unwilling) +
                    ": " + why + ". Ranks can share one in a run of one process");
      }
      shared = true;
    }
  }
  return shared;
}

StorePtr store_of_run(const StorePtr& store, const LaunchEnvironment& launch, int run) {
  return c10::make_intrusive<c10d::PrefixStore>(job_prefix(launch.job) + run_prefix(run), store);
}

// Gives the last run that this process came to, or 0 if there is none.
int last_run_of(const StorePtr& store, const LaunchEnvironment& launch) {
  int run = 0;
  while (store_of_run(store, launch, run + 1)->check({came_key(launch.rank)})) ++run;
  return run;
}

// Gives the settings that only the first of two comma-separated lists has.
std::string only_in(const std::string& text, const std::string& other) {
  const std::string comma = ", ", others = comma + other + comma;
  std::string only;
  for (size_t begin = 0, end = 0; begin < text.size(); begin = end + comma.size()) {
    end = std::min(text.find(comma, begin), text.size());
    const std::string setting = text.substr(begin, end - begin);
    if (others.find(comma + setting + comma) == others.npos) only += (only.empty() ? "" : comma) + setting;
  }
  return only;
}

bool is_of_build(const std::string& setting) {
  return setting.find(',') == setting.npos && (setting.starts_with("build ") || setting.starts_with("any build "));
}

}  // namespace

std::string run_prefix(int run) {
  return "run-" + std::to_string(run);
}

Roster meet(c10d::Store& store, const LaunchEnvironment& launch, const Devices& devices_here,
            const std::string& configuration, const WaitLimit& limit) {
  if (add_to_count(store, came_key(launch.rank), 1) != 1) {
    const std::string text = "two processes say that they are " + launch.process_name() +
                             ": each needs a rank of its own, and each job a MASTER_PORT of its own. Jobs with "
                             "different keys (LOCKSTEP_JOB_KEY_FILE) do not mix";
    if (store.check({kMet}) || absent(store, launch.world_size).empty()) throw NobodyMissed(text);
    throw Error(text);
  }
  Introduction mine{configuration, host_name(), devices_here};
  if (devices_here[0].is_cuda()) mine.unshared = why_no_gpu_is_shared();
  for (const auto& device : devices_here) {
    mine.gpus.push_back(gpu(device));
    mine.kinds.push_back(processor_kind(device));
  }
  store.set(key_of(launch.rank), mine.to_text());
  wait_for_all(store, launch, limit);
  leave_another_job_alone(store, launch);

  const auto all = read_all(store, launch.world_size);
  for (int process = 1; process < launch.world_size; ++process) {
    const std::string &theirs = all[process].configuration, &first = all[0].configuration;
    if (theirs == first) continue;
    std::string differs = only_in(theirs, first), of_first = only_in(first, theirs);
    if (differs.empty() && of_first.empty()) {  // they differ in order, or in how often a setting occurs
      differs = theirs;
      of_first = first;
    }
    if (differs.empty()) differs = "nothing of that";
    if (of_first.empty()) of_first = "nothing of that";
    const bool is_build = is_of_build(differs) || is_of_build(of_first);
    throw Error("process " + std::to_string(process) + " runs another program or configuration than process 0: " +
                    differs + "; process 0: " + of_first + ". All processes must run the same, on the same data" +
                    (is_build ? ". Build in the same folder everywhere, or copy the program. If builds may differ, as "
                                "for several kinds "
                                "of CPU, set LOCKSTEP_MIXED_BUILDS=1 for all"
                              : ""),
                {Error::difference});
  }
  check_that_something_connects(all);
  Roster roster = roster_of(all);
  roster.shares_gpus = share_gpus(all);
  store.set(kMet, std::to_string(launch.world_size));
  return roster;
}

void call_off(c10d::Store& store, const Failure& failure) {
  try {
    const std::string text = to_stored(failure);
    const std::vector<uint8_t> bytes(text.begin(), text.end());
    store.compareSet("failure", {}, bytes);
  } catch (const std::exception&) {  // then the others end at their deadline
  }
}

namespace {

Error::Data death_data(const ProcessEnd& process) {
  return {process.stopped ? Error::stopped : Error::death};
}

// Names the process by its ranks if the processes have met.
Failure end_in(c10d::Store& run, const LaunchEnvironment& launch, const ProcessEnd& process) {
  const Failure before_they_met{launch.process_name() + " is gone: " + process.how, death_data(process)};
  if (!absent(run, launch.world_size).empty()) return before_they_met;
  try {
    const Roster roster = roster_of(read_all(run, launch.world_size));
    return {"the process of " + roster.name_process(launch.rank) + " is gone: " + process.how,
            {Error::death, roster.list_of(launch.rank)}};
  } catch (const ForeignValue&) {  // the processes report that themselves
    return before_they_met;
  }
}

}  // namespace

void announce_end(const StorePtr& store, const LaunchEnvironment& launch, const ProcessEnd& process) {
  const int run = last_run_of(store, launch);
  if (run > 0 && process.failed) {
    const auto last = store_of_run(store, launch, run);
    call_off(*last, end_in(*last, launch, process));
  }
  const std::string absence = launch.process_name() + " did not come to run(): " + process.how;
  call_off(*store_of_run(store, launch, run + 1), {absence, death_data(process)});
}

Failure farewell(c10d::Store& store, const Rendezvous& rendezvous, std::chrono::milliseconds limit, int dead) {
  try {
    const auto deadline = Clock::now() + limit;
    int64_t gone = add_to_count(store, "farewells", 1);
    while (rendezvous.hosts_store() && gone + dead < rendezvous.launch().world_size && Clock::now() < deadline) {
      std::this_thread::sleep_for(kBetweenLooks);
      gone = stored_count(store, "farewells");
    }
  } catch (const ForeignValue& error) {
    return error;
  } catch (const std::exception&) {  // the store is gone, so nobody listens
  }
  return {};
}

}  // namespace lockstep::comm

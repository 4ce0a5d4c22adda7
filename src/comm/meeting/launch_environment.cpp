#include "launch_environment.hpp"

#include <lockstep/base/error.hpp>
#include <lockstep/devices/device_info.hpp>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <initializer_list>
#include <utility>

namespace lockstep::comm {
namespace {

constexpr const char* torchrun_names[] = {"RANK",        "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
                                          "MASTER_ADDR", "MASTER_PORT"};

class Reader {
 public:
  Reader(const Environment& environment, std::string launcher)
      : environment_(environment), launcher_(std::move(launcher)) {}

  bool has(const char* name) const { return !text(name).empty(); }

  // Gives "" for a variable that is not set, or set to nothing.
  std::string text(const char* name) const {
    const char* const value = environment_(name);
    return value == nullptr ? "" : value;
  }

  void need(std::initializer_list<const char*> names) const {
    std::string missing;
    for (const char* name : names) {
      if (!has(name)) missing += (missing.empty() ? "" : ", ") + std::string(name);
    }
    if (!missing.empty()) {
      throw Error("the environment of " + launcher_ + " is incomplete: " + missing +
                  " not set. Start the program through the launcher, or unset the launcher's other variables for ranks "
                  "as threads of one process");
    }
  }

  int number(const char* name, int largest = 1 << 20) const {
    const std::string value = text(name);
    int number = -1;
    const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
    if (error != std::errc() || end != value.data() + value.size() || number < 0 || number > largest) {
      throw Error(set(name) + " in the environment is not a number from 0 to " + std::to_string(largest));
    }
    return number;
  }

  // Checks that index < count, by the names of both variables.
  void check_below(const char* index, const char* count) const {
    if (number(index) >= number(count)) contradiction(set(index) + " must be less than " + set(count));
  }

  void check_at_most(const char* part, const char* whole) const {
    if (number(part) > number(whole)) contradiction(set(part) + " must not be more than " + set(whole));
  }

  [[noreturn]] void contradiction(const std::string& what) const {
    throw Error("the environment of " + launcher_ + " contradicts itself: " + what);
  }

  std::string set(const char* name) const { return std::string(name) + "=" + text(name); }

  const std::string& launcher() const { return launcher_; }

 private:
  const Environment& environment_;
  std::string launcher_;
};

LaunchEnvironment numbers(const Reader& reader, const char* rank, const char* world_size, const char* local_rank,
                          const char* local_world_size) {
  reader.need({rank, world_size, local_rank, local_world_size});
  reader.check_below(rank, world_size);
  reader.check_below(local_rank, local_world_size);
  reader.check_at_most(local_world_size, world_size);
  return {.launcher = reader.launcher(),
          .rank = reader.number(rank),
          .world_size = reader.number(world_size),
          .local_rank = reader.number(local_rank),
          .local_world_size = reader.number(local_world_size)};
}

int port_number(const Reader& reader) {
  const int port = reader.number("MASTER_PORT", 65535);
  if (port == 0) throw Error("MASTER_PORT=0 in the environment: all processes must know the port, so give its number");
  return port;
}

LaunchEnvironment torchrun(const Reader& reader) {
  auto launch = numbers(reader, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE");
  reader.need({"MASTER_ADDR", "MASTER_PORT"});
  launch.address = reader.text("MASTER_ADDR");
  launch.port = port_number(reader);
  const std::string agent_store = reader.text("TORCHELASTIC_USE_AGENT_STORE");
  launch.agent_store = agent_store == "True" || agent_store == "true" || agent_store == "1";
  launch.tcp_store = launch.agent_store && reader.text("LOCKSTEP_STORE_PORT") != reader.text("MASTER_PORT");
  // The job's name has the attempt, since the agent's store outlives a restart of the processes.
  launch.job =
      "attempt-" + (reader.has("TORCHELASTIC_RESTART_COUNT") ? reader.text("TORCHELASTIC_RESTART_COUNT") : "0");
  return launch;
}

// These launchers give no place to meet. One machine has loopback; for several, the user names an address.
void add_rendezvous(const Reader& reader, LaunchEnvironment& launch, const std::string& how_to_set) {
  if (reader.has("MASTER_ADDR")) launch.address = reader.text("MASTER_ADDR");
  if (reader.has("MASTER_PORT")) launch.port = port_number(reader);
  if (launch.local_world_size == launch.world_size || (!launch.address.empty() && launch.port != 0)) return;
  throw Error(launch.launcher + " started processes on several machines: set MASTER_ADDR to an address of rank 0's " +
              "machine that the others reach, and MASTER_PORT to a free port there, for all processes (" + how_to_set +
              ")");
}

LaunchEnvironment open_mpi(const Reader& reader) {
  auto launch = numbers(reader, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
                        "OMPI_COMM_WORLD_LOCAL_SIZE");
  for (const char* id : {"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMIX_ID"}) {
    if (launch.job.empty() && reader.has(id)) launch.job = "mpirun-" + reader.text(id);
  }
  add_rendezvous(reader, launch, "mpirun -x MASTER_ADDR=… -x MASTER_PORT=…");
  return launch;
}

// Makes "node03" of "node[03-05,07],other".
std::string first_host(const std::string& list) {
  const size_t end = list.find_first_of(",[");
  std::string host = list.substr(0, end);
  if (end != std::string::npos && list[end] == '[') {
    host += list.substr(end + 1, list.find_first_of(",-]", end + 1) - end - 1);
  }
  return host;
}

// Reads from SLURM's "2(x3),1" how many processes the machine with index `node` has. Gives 0 if the text does not say.
int tasks_of_node(const std::string& text, int node) {
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    int tasks = 0, nodes = 1;
    const auto count_end = std::from_chars(text.data() + begin, text.data() + end, tasks).ptr;
    if (text.data() + end - count_end > 3) std::from_chars(count_end + 2, text.data() + end, nodes);
    if (node < nodes) return tasks;
    node -= nodes;
    begin = end + 1;
  }
  return 0;
}

// srun starts rank 0 by default on the step's first machine. The port follows from the job's number, and lies below the
// ports that systems hand out by themselves.
void derive_rendezvous(const Reader& reader, LaunchEnvironment& launch) {
  launch.address = first_host(reader.text("SLURM_STEP_NODELIST"));
  if (reader.has("SLURM_JOB_ID")) launch.port = 15000 + reader.number("SLURM_JOB_ID", 1 << 30) % 15000;
}

LaunchEnvironment slurm(const Environment& environment) {
  const Reader plain(environment, "srun (SLURM)");
  plain.need({"SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_TASKS_PER_NODE"});
  const std::string local_size =
      std::to_string(tasks_of_node(plain.text("SLURM_STEP_TASKS_PER_NODE"), plain.number("SLURM_NODEID")));
  const char* const derived = "SLURM_STEP_TASKS_PER_NODE";
  const Environment with_local_size = [&](const char* name) {
    return name == derived ? local_size.c_str() : environment(name);
  };
  const Reader reader(with_local_size, plain.launcher());
  auto launch = numbers(reader, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", derived);
  launch.job = "slurm-" + reader.text("SLURM_JOB_ID") + "-" + reader.text("SLURM_STEP_ID");
  if (launch.local_world_size < launch.world_size) derive_rendezvous(reader, launch);
  add_rendezvous(reader, launch, "export them before srun");
  return launch;
}

bool is_switched_on(const Environment& environment, const char* name) {
  const std::string value = environment(name) == nullptr ? "" : environment(name);
  if (!value.empty() && value != "0" && value != "1") {
    throw Error(std::string(name) + "=" + value + " in the environment is neither 0 nor 1");
  }
  return value == "1";
}

// Only `lockstep launch` sets these.
void add_elastic(const Environment& environment, LaunchEnvironment& launch) {
  const Reader reader(environment, "lockstep launch, of an elastic job");
  if (!reader.has("LOCKSTEP_ELASTIC_MEMBER")) return;
  reader.need({"LOCKSTEP_ELASTIC_MIN"});
  launch.member = reader.number("LOCKSTEP_ELASTIC_MEMBER");
  launch.fewest = reader.number("LOCKSTEP_ELASTIC_MIN");
}

std::optional<LaunchEnvironment> by_launcher(const Environment& environment) {
  const Reader any(environment, "torchrun or lockstep launch");
  // MASTER_ADDR and MASTER_PORT alone mean nothing, since clusters set them for everybody.
  const auto is_set = [&](const char* name) { return any.has(name); };
  if (std::any_of(torchrun_names, torchrun_names + 4, is_set)) return torchrun(any);
  if (is_set("OMPI_COMM_WORLD_RANK") || is_set("OMPI_COMM_WORLD_SIZE")) {
    return open_mpi(Reader(environment, "mpirun (Open MPI)"));
  }
  // A batch script has SLURM_PROCID too; only srun starts the processes of a step.
  if (is_set("SLURM_STEP_NUM_TASKS")) return slurm(environment);
  return std::nullopt;
}

}  // namespace

std::optional<LaunchEnvironment> read_launch_environment(const Environment& environment) {
  auto launch = by_launcher(environment);
  if (launch) {
    launch->mixed_builds = is_switched_on(environment, "LOCKSTEP_MIXED_BUILDS");
    launch->key_file = Reader(environment, launch->launcher).text("LOCKSTEP_JOB_KEY_FILE");
    add_elastic(environment, *launch);
  }
  return launch;
}

std::optional<std::chrono::milliseconds> rendezvous_timeout_in(const Environment& environment) {
  const char* const text = environment("LOCKSTEP_RENDEZVOUS_TIMEOUT");
  if (text == nullptr || *text == '\0') return std::nullopt;
  const char* const text_end = text + std::string_view(text).size();
  double seconds = 0;
  const auto [end, error] = std::from_chars(text, text_end, seconds);
  if (error != std::errc() || end != text_end || !(seconds > 0) || seconds > 1e6) {
    throw Error("LOCKSTEP_RENDEZVOUS_TIMEOUT=" + std::string(text) + " in the environment is not a number of seconds");
  }
  return std::chrono::milliseconds(std::llround(std::ceil(seconds * 1000)));
}

bool mixed_processors_in(const Environment& environment) {
  return is_switched_on(environment, "LOCKSTEP_MIXED_PROCESSORS");
}

Devices share_out(const Devices& devices, int local_rank, int local_world_size) {
  const auto count = static_cast<int>(devices.size());
  if (count == 1) return devices;  // meet() looks whether processes may share one GPU
  if (count % local_world_size != 0) {
    throw Error(
        "the device list " + to_string(devices) + " has " + std::to_string(count) + " entries, which the " +
        std::to_string(local_world_size) +
        " processes on this machine cannot share out evenly. The list is the machine's: name as many devices as "
        "there are processes, or a multiple of that; \"cpu\" gives each process one CPU rank");
  }
  const int each = count / local_world_size;
  const auto begin = devices.begin() + local_rank * each;
  return {begin, begin + each};
}

}  // namespace lockstep::comm

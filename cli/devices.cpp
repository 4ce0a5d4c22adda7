// lockstep devices: shows the devices of this machine and those that a run would use.
#include <lockstep/devices/device_info.hpp>
#include <lockstep/devices/devices.hpp>

#include <string>

#include "commands.hpp"
#include "devices/cpu_cores.hpp"
#include "devices/processor_kind.hpp"
#include "text.hpp"

namespace lockstep::cli {

namespace {

const char* const devices_examples =
    "Examples:\n"
    "  lockstep devices\n"
    "      GPUs with their memory, CPU cores, the versions in use. Hyperthreads are\n"
    "      no cores: two of one core count once, here and where ranks are made.\n"
    "  lockstep train --devices cuda:0,cuda:1\n"
    "      Devices by the names that are listed here.\n";

std::string gigabytes(int64_t bytes) {
  return format("%.1f GB", static_cast<double>(bytes) / 1e9);
}

int devices_command(Output& output) {
  Rows rows;
  for (const c10::Device& device : gpus()) {
    const GpuInfo gpu = gpu_info(device);
    const std::string memory = gigabytes(gpu.free_bytes) + " of " + gigabytes(gpu.total_bytes) + " free";
    rows.emplace_back(device.str(), (gpu.name.empty() ? "GPU" : gpu.name) +
                                        (gpu.total_bytes > 0 ? ", " + memory : ", memory unknown"));
  }
  if (rows.empty()) rows.emplace_back("GPUs", "none");
  const std::string model = cpu_name();
  rows.emplace_back("CPU cores", text_of_cores(cpu_cores(), affinity_cpus()) + (model.empty() ? "" : ", " + model));
  rows.emplace_back("arithmetic", processor_kind(c10::kCPU) + ", of the CPU: only equal ones give the same bits");
  rows.emplace_back(
      "default", to_string(default_devices()) + ", one rank each, unless fewer ranks of several threads train faster");
  rows.emplace_back("LibTorch", torch_version());
  rows.emplace_back("lockstep",
                    version() + (LOCKSTEP_HAS_CUDA ? ", built with CUDA and NCCL" : ", built without CUDA and NCCL"));
  output.print(table(rows));
  return 0;
}

}  // namespace

Command add_devices(CLI::App& program) {
  CLI::App* const app = program.add_subcommand("devices", "List this machine's devices and the default choice.");
  app->footer(devices_examples);
  return {app, devices_command};
}

}  // namespace lockstep::cli

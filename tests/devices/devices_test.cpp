#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <lockstep/devices/device_info.hpp>
#include <lockstep/devices/devices.hpp>

#include <filesystem>
#include <fstream>

#include "devices/check_devices.hpp"
#include "devices/cpu_cores.hpp"
#include "support/error_of.hpp"

namespace lockstep {
namespace devices_test {

const c10::Device cpu(c10::kCPU);

c10::Device gpu(int i) {
  return c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(i));
}

Devices gpus_of(int count, c10::DeviceType type = c10::kCUDA) {
  Devices devices;
  for (int i = 0; i < count; ++i) devices.emplace_back(type, static_cast<c10::DeviceIndex>(i));
  return devices;
}

// On a machine with so many GPUs.
Devices parsed(const std::string& spec, int gpu_count) {
  return parse_devices(spec, gpus_of(gpu_count));
}

Caught refusal(const std::string& spec, int gpu_count) {
  return error_of([&] { parsed(spec, gpu_count); });
}

TEST(ParseDevices, NumberMeansGpusOrCpuRanks) {
  EXPECT_EQ(parsed("2", 0), Devices(2, cpu));
  EXPECT_EQ(parsed("1", 0), Devices{cpu});
  EXPECT_EQ(parsed("1", 1), Devices{gpu(0)});
  EXPECT_EQ(parsed("2", 4), (Devices{gpu(0), gpu(1)}));
  EXPECT_THAT(refusal("2", 1), Refused());
}

TEST(ParseDevices, NamesStandForDevices) {
  for (int gpus : {0, 1, 2, 4}) {
    EXPECT_EQ(parsed("cpu", gpus), Devices{cpu});
    EXPECT_EQ(parsed("cpu,cpu", gpus), Devices(2, cpu));
    EXPECT_EQ(parsed("3xcpu", gpus), Devices(3, cpu));
    EXPECT_EQ(parsed("cpu,2xcpu", gpus), Devices(3, cpu));
  }
  EXPECT_EQ(parsed("cuda", 1), Devices{gpu(0)});
  EXPECT_EQ(parsed("cuda", 4), (Devices{gpu(0), gpu(1), gpu(2), gpu(3)}));
  EXPECT_EQ(parsed("cuda:1", 2), Devices{gpu(1)});
  EXPECT_EQ(parsed("cuda:3,cuda:0", 4), (Devices{gpu(3), gpu(0)}));
  EXPECT_EQ(parsed("2xcuda:0", 1), Devices(2, gpu(0)));
  EXPECT_EQ(parsed("2xcuda:1,cuda:0", 2), (Devices{gpu(1), gpu(1), gpu(0)}));
}

TEST(ParseDevices, BlanksDoNotMatter) {
  EXPECT_EQ(parsed(" 2\n", 0), Devices(2, cpu));
  EXPECT_EQ(parsed("\tcpu , cpu ", 0), Devices(2, cpu));
  EXPECT_EQ(parsed(" 2 x cpu", 0), Devices(2, cpu));
}

TEST(ParseDevices, RefusesTextThatNamesNoDevices) {
  for (int gpus : {0, 1, 2, 4}) {
    for (const char* spec :
         {"",      "  ", "cpu,,cpu", ",",     "cpu,",   ",cpu", "gpu", "cuda:", "cuda:-1", "cuda:x", "cuda:0x1",
          "cpu:0", "2x", "xcpu",     "2xgpu", "-2xcpu", "2.5",  "+1",  "two",   "cpu;cpu", "CPU"}) {
      EXPECT_THAT(refusal(spec, gpus), Refused()) << spec;
    }
  }
  EXPECT_THAT(refusal("-1", 0), Refused());
  EXPECT_THAT(refusal("cuda:-1", 2), Refused());
}

TEST(ParseDevices, RefusesNoneAndTooMany) {
  for (int gpus : {0, 1, 2, 4}) {
    for (const char* spec : {"0", "0xcpu", "cpu,0xcpu"}) EXPECT_THAT(refusal(spec, gpus), Refused());
    for (const char* spec :
         {"1000000", "1025", "1025xcpu", "1000xcpu,25xcpu", "99999999999999999999", "99999999999999999999xcpu"}) {
      EXPECT_THAT(refusal(spec, gpus), Refused()) << spec;
    }
  }
  EXPECT_EQ(parsed("1024xcpu", 0).size(), 1024u);
}

TEST(ParseDevices, ListsTheGpusThatAreThere) {
  EXPECT_THAT(refusal("cuda:99", 2), Refused());
  EXPECT_THAT(refusal("cuda:256", 1), Refused());
  EXPECT_THAT(refusal("cuda:99999999999999999999", 1), Refused());
  EXPECT_THAT(refusal("2xcuda:4", 4), Refused());
  for (const char* spec : {"cuda", "cuda:0", "2xcuda:0"}) {
    EXPECT_THAT(refusal(spec, 0), Refused()) << spec;
  }
}

TEST(ParseDevices, RefusesListsThatCouldMeanTwoThingsOrMixTypes) {
  EXPECT_THAT(refusal("2xcuda", 4), Refused());
  EXPECT_THAT(refusal("cpu,cuda:0", 1), Refused());
  EXPECT_THAT(refusal("cuda,2xcpu", 4), Refused());
}

TEST(ParseDevices, KnowsAllTypesOfGpusThatLibTorchKnows) {
  const Devices intel = gpus_of(2, c10::kXPU), apple = gpus_of(1, c10::kMPS);
  EXPECT_EQ(parse_devices("2", intel), intel);
  EXPECT_EQ(parse_devices("xpu", intel), intel);
  EXPECT_EQ(parse_devices("2xxpu:1,xpu:0", intel), (Devices{intel[1], intel[1], intel[0]}));
  EXPECT_EQ(parse_devices("mps", apple), apple);
  EXPECT_EQ(parse_devices("2xmps:0", apple), Devices(2, apple[0]));
  EXPECT_EQ(parse_devices("2xcpu", apple), Devices(2, cpu));

  const auto refused = [](const std::string& spec, const Devices& gpus) {
    return error_of([&] { parse_devices(spec, gpus); });
  };
  EXPECT_THAT(refused("xpu:2", intel), Refused());
  EXPECT_THAT(refused("cuda:0", intel), Refused());
  EXPECT_THAT(refused("mps", {}), Refused());
  EXPECT_THAT(refused("3", intel), Refused());
  EXPECT_THAT(refused("2xxpu", intel), Refused());
  EXPECT_THAT(refused("meta", intel), Refused());
}

TEST(ParseDevices, ANumberMeansTheFirstTypeThatIsThere) {
  const Devices both{gpu(0), gpu(1), {c10::kXPU, 0}};
  EXPECT_EQ(parse_devices("2", both), (Devices{gpu(0), gpu(1)}));
  EXPECT_EQ(parse_devices("xpu", both), Devices{both[2]});
  EXPECT_THAT(error_of([&] { parse_devices("cuda,xpu", both); }), Refused());
}

TEST(Devices, OnesThatAreNotThereAreNamed) {
  for (const auto& device : {c10::Device(c10::kMPS, 5), c10::Device(c10::kMeta)}) {
    EXPECT_THAT(error_of([&] { check_devices({device}); }), Refused());
  }
}

TEST(Devices, DefaultIsEveryGpuOrOneCpuRankPerCore) {
  Devices expected = gpus();
  if (expected.empty()) expected.assign(static_cast<size_t>(cpu_cores()), cpu);
  std::erase_if(expected, [type = expected[0].type()](const c10::Device& other) { return other.type() != type; });
  EXPECT_EQ(default_devices(), expected);
}

TEST(Devices, GpusHaveMemory) {
  for (const c10::Device& gpu : gpus()) {
    const GpuInfo info = gpu_info(gpu);
    EXPECT_EQ(info.device, gpu);
    EXPECT_GT(info.free_bytes, 0);
    EXPECT_GE(info.total_bytes, info.free_bytes);
  }
  EXPECT_THAT(error_of([] { gpu_info(cpu); }), Refused());
  EXPECT_THAT(error_of([] { gpu_info(gpu(static_cast<int>(gpus().size()))); }), Refused());
}

TEST(Devices, PrintAsTheSectionPrintsThem) {
  EXPECT_EQ(to_string(Devices{cpu, cpu}), "[cpu, cpu]");
  EXPECT_EQ(to_string(Devices{gpu(0)}), "[cuda:0]");
  EXPECT_EQ(to_string(Devices{}), "[]");
}

// Writes small files of /sys and /proc as other machines have them.
class CpuCores : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = (std::filesystem::temp_directory_path() / "lockstep_cores_XXXXXX").string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    root_ = name;
  }
  void TearDown() override { std::filesystem::remove_all(root_); }

  void write(const std::string& file, const std::string& text) {
    std::filesystem::create_directories((root_ / file).parent_path());
    std::ofstream(root_ / file) << text << "\n";
  }
  void write_cpu(int cpu, int package, int core) {
    const std::string folder = "cpu" + std::to_string(cpu) + "/topology/";
    write(folder + "physical_package_id", std::to_string(package));
    write(folder + "core_id", std::to_string(core));
  }
  double quota() const { return cpu_quota(root_ / "cgroup", root_ / "self"); }

  std::filesystem::path root_;
};

TEST_F(CpuCores, CountsHyperthreadsOnceAndOnlyTheMask) {
  for (int cpu = 0; cpu < 8; ++cpu) write_cpu(cpu, cpu / 2 % 2, cpu % 2);  // 2 packages of 2 cores with 2 threads
  EXPECT_EQ(physical_cores({0, 1, 2, 3, 4, 5, 6, 7}, root_), 4);
  EXPECT_EQ(physical_cores({0, 4}, root_), 1);
  EXPECT_EQ(physical_cores({0, 1, 4}, root_), 2);
  EXPECT_EQ(physical_cores({0, 2}, root_), 2);
  EXPECT_EQ(physical_cores({0, 40, 41}, root_), 3) << "CPUs without a readable topology count as cores";
}

TEST_F(CpuCores, AreTold) {
  for (int cpu = 0; cpu < 4; ++cpu) write_cpu(cpu, 0, cpu % 2);  // 2 cores with 2 threads
  EXPECT_EQ(text_of_cores(2, {0, 1, 2, 3}, root_), "2 (4 hyperthreads)");
  EXPECT_EQ(text_of_cores(1, {0, 1, 2, 3}, root_), "1 of 2 (4 hyperthreads)");
  EXPECT_EQ(text_of_cores(2, {0, 1}, root_), "2");
  EXPECT_EQ(text_of_cores(1, {0, 2}, root_), "1 (2 hyperthreads)");
}

TEST_F(CpuCores, ReadsTheQuotaOfVersion2) {
  write("self", "0::/");
  EXPECT_EQ(quota(), no_quota);
  write("cgroup/cpu.max", "max 100000");
  EXPECT_EQ(quota(), no_quota);
  write("cgroup/cpu.max", "150000 100000");
  EXPECT_EQ(quota(), 1.5);
}

TEST_F(CpuCores, TakesTheSmallestQuotaOnTheWayUp) {
  write("self", "0::/user/job");
  write("cgroup/user/job/cpu.max", "max 100000");
  write("cgroup/user/cpu.max", "300000 100000");
  EXPECT_EQ(quota(), 3);
  write("cgroup/user/job/cpu.max", "200000 100000");
  EXPECT_EQ(quota(), 2);
  write("cgroup/other/cpu.max", "100000 100000");
  EXPECT_EQ(quota(), 2);
}

TEST_F(CpuCores, ReadsTheQuotaOfVersion1) {
  write("self", "5:memory:/a\n4:cpu,cpuacct:/job\n3:cpuset:/b");
  write("cgroup/cpu/cpu.cfs_quota_us", "-1");
  write("cgroup/cpu/cpu.cfs_period_us", "100000");
  EXPECT_EQ(quota(), no_quota);
  write("cgroup/cpu/job/cpu.cfs_quota_us", "400000");
  write("cgroup/cpu/job/cpu.cfs_period_us", "100000");
  EXPECT_EQ(quota(), 4);
}

TEST_F(CpuCores, IsNotDisturbedByFilesItCannotRead) {
  write("self", "nonsense\n::\n0:");
  write("cgroup/cpu.max", "-5 0");
  EXPECT_EQ(quota(), no_quota);
  std::filesystem::remove(root_ / "self");
  EXPECT_EQ(quota(), no_quota);
}

TEST_F(CpuCores, OfThisMachineAreAtLeastOneAndWithinTheMask) {
  EXPECT_GE(cpu_cores(), 1);
  EXPECT_LE(static_cast<size_t>(cpu_cores()), affinity_cpus().size());
}

}  // namespace devices_test
}  // namespace lockstep

// Labels: concurrency
// Not under sanitizers: KeepFreedMemory.AFreed*:KeepFreedMemory.TooMuch*:KeepFreedMemory.TensorsLie*
// keep_freed_memory: tensors as LibTorch gives them, from memory that malloc gives.
#include <c10/core/CPUAllocator.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <lockstep/devices/keep_freed_memory.hpp>

#include "devices/memory_meter.hpp"

#include <cstdint>
#include <cstdio>
#include <fstream>
#include <limits>
#include <string>
#include <thread>
#include <vector>

namespace keep_freed_memory_test {

using lockstep::MemoryMeter;
using torch::Tensor;

struct KeepFreedMemory : testing::Test {
  KeepFreedMemory() { lockstep::keep_freed_memory(); }

  static bool is_on_a_line(const void* data) { return reinterpret_cast<uintptr_t>(data) % 64 == 0; }
};

TEST_F(KeepFreedMemory, TensorsHaveMemoryOfTheirOwnThatBeginsOnALine) {
  std::vector<Tensor> tensors;
  for (int64_t size = 1; size < 10'000'000; size += 1 + size / 3) tensors.push_back(torch::full({size}, size));
  EXPECT_EQ(torch::empty({0}).data_ptr(), nullptr);
  for (const auto& tensor : tensors) {
    EXPECT_TRUE(is_on_a_line(tensor.data_ptr())) << tensor.numel();
    EXPECT_TRUE((tensor == tensor.numel()).all().item<bool>()) << tensor.numel();
  }
}

TEST_F(KeepFreedMemory, AFreedTensorsMemoryIsTheNextOnes) {
  const std::vector<Tensor> around = {torch::empty({100'000}), torch::empty({100'000})};
  Tensor tensor = torch::empty({50'000});
  const Tensor behind = torch::empty({50'000});
  const void* const before = tensor.data_ptr();
  for (int i = 0; i < 10; ++i) {
    tensor.reset();
    tensor = torch::empty({50'000});
    EXPECT_EQ(tensor.data_ptr(), before);
  }
}

// The kernel's flags of the mapping that has this address: "hg" where huge pages were asked for.
std::string flags_of_mapping(const void* data) {
  const auto place = reinterpret_cast<uintptr_t>(data);
  std::ifstream mappings("/proc/self/smaps");
  bool is_it = false;
  for (std::string line; std::getline(mappings, line);) {
    uintptr_t begin = 0, end = 0;
    if (std::sscanf(line.c_str(), "%lx-%lx ", &begin, &end) == 2) is_it = begin <= place && place < end;
    if (is_it && line.starts_with("VmFlags:")) return line + " ";
  }
  return "";
}

TEST_F(KeepFreedMemory, TensorsLieWhereHugePagesWereAskedFor) {
  if (!std::ifstream("/sys/kernel/mm/transparent_hugepage/enabled")) GTEST_SKIP() << "this kernel has no huge pages";
  std::thread([] {
    for (const int64_t bytes : {1'000, 3'000'000, 100'000'000}) {
      const Tensor tensor = torch::empty({bytes}, torch::kByte);
      const auto* const middle = static_cast<const char*>(tensor.const_data_ptr()) + bytes / 2;
      EXPECT_THAT(flags_of_mapping(middle), testing::HasSubstr(" hg ")) << bytes;
    }
  }).join();
}

TEST_F(KeepFreedMemory, AnotherThreadMayFree) {
  for (int round = 0; round < 20; ++round) {
    std::vector<Tensor> tensors;
    for (int i = 0; i < 100; ++i) tensors.push_back(torch::full({1 + 37 * i}, i));
    const Tensor sum = torch::zeros({1});
    std::thread([&] {
      for (auto& tensor : tensors) sum.add_(tensor[0]);
      tensors.clear();
    }).join();
    EXPECT_EQ(sum.item<double>(), 4950);
  }
}

TEST_F(KeepFreedMemory, MetersSeeTheTensors) {
  const MemoryMeter meter;
  Tensor tensor = torch::empty({1 << 20}, torch::kByte);
  EXPECT_EQ(meter.current(), 1 << 20);
  tensor.reset();
  EXPECT_EQ(meter.current(), 0);
}

TEST_F(KeepFreedMemory, MemoryWithoutATensorComesAndGoesToo) {
  c10::Allocator* const allocator = c10::GetCPUAllocator();
  void* const memory = allocator->raw_allocate(1000);
  EXPECT_TRUE(is_on_a_line(memory));
  static_cast<char*>(memory)[999] = 1;
  allocator->raw_deallocate(memory);
}

TEST_F(KeepFreedMemory, TooMuchIsLibTorchsError) {
  for (const int64_t bytes : {int64_t{1} << 60, std::numeric_limits<int64_t>::max()}) {
    std::string error;
    try {
      c10::GetCPUAllocator()->allocate(static_cast<size_t>(bytes));
    } catch (const c10::Error& caught) {
      error = caught.msg();
    }
    EXPECT_THAT(error, testing::HasSubstr("you tried to allocate " + std::to_string(bytes)));
  }
}

}  // namespace keep_freed_memory_test

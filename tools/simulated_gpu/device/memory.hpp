// Allocator: as LibTorch's for CUDA, gives freed memory back to its stream at once, without a wait, and to nobody else.
// The memory is filled with 0xFF, which is NaN, in the order of that stream. recordStream delays this. What a recorded
// stream is given belongs to its graph until that is destroyed.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>

#include <map>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "accesses.hpp"
#include "device.hpp"

namespace simulated {

class Graph;

class Allocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override;
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override;
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override;
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override { return {}; }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {}
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) override;  // free, total

  // `stream` is given a task that uses these bytes. With order().
  void note(const Stream& stream, const char* begin, const char* end, bool writes, const std::string& what);

  // The graph's memory is free once these streams, on which it was replayed, have passed. With order().
  void end_graph(const Graph& graph, const std::set<Stream*>& streams);

 private:
  struct Block {
    char* begin;
    size_t size;
    Stream* stream;
    std::set<Stream*> recorded;
    Accesses accesses;
    const Graph* graph;  // the graph that owns the block; null: none
    bool is_free;        // no tensor has it
  };
  using Points = std::vector<std::shared_ptr<Point>>;

  static void release(void* block);

  // Hold order().
  void give_back(Block& block);
  void give_back_to_graph(Block& block);
  void spare_after(Block& block, const std::set<Stream*>& streams);
  void make_spare(Block& block);
  void reclaim();

  std::map<int, size_t> taken_;         // bytes by device that were given out once
  std::map<const char*, Block*> used_;  // blocks by address that a tensor or a graph has
  std::map<std::tuple<const Graph*, Stream*, size_t>, std::vector<Block*>> spare_;
  std::vector<std::pair<Block*, Points>> waiting_;  // blocks that wait until the recorded streams have passed
};

Allocator& allocator();

}  // namespace simulated

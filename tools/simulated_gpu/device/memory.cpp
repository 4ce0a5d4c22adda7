#include "memory.hpp"

#include <algorithm>
#include <cstring>

#include "graph.hpp"
#include "launch.hpp"
#include "reports.hpp"

namespace simulated {

c10::DataPtr Allocator::allocate(size_t bytes) {
  const int index = current_device();
  const c10::Device place(kType, static_cast<c10::DeviceIndex>(index));
  if (bytes == 0) return {nullptr, nullptr, &release, place};
  const std::lock_guard lock(order());
  reclaim();
  Stream& stream = current_stream(index);
  const size_t size = (bytes + 511) / 512 * 512;
  auto& spare = spare_[{stream.recorder, &stream, size}];
  Block* block = nullptr;
  if (!spare.empty()) {
    block = spare.back();
    spare.pop_back();
  } else {
    size_t& taken = taken_[index];
    TORCH_CHECK_WITH(OutOfMemoryError, taken + size <= kBytes, "simulated device ", index, " is out of memory");
    block = new Block{device(index).memory() + taken, size, &stream, {}, {}, nullptr, true};
    taken += size;
  }
  block->graph = stream.recorder;
  block->is_free = false;
  used_[block->begin] = block;
  return {block->begin, block, &release, place};
}

void Allocator::copy_data(void*, const void*, std::size_t) const {
  TORCH_CHECK(false, "the simulated device copies tensors only");
}

void Allocator::recordStream(const c10::DataPtr& pointer, c10::Stream stream) {
  auto* const block = static_cast<Block*>(pointer.get_context());
  if (block == nullptr) return;
  const std::lock_guard lock(order());
  if (&stream_of(stream) != block->stream) block->recorded.insert(&stream_of(stream));
}

std::pair<size_t, size_t> Allocator::getMemoryInfo(c10::DeviceIndex index) {
  ++counts().uses.at(static_cast<size_t>(index));
  const std::lock_guard lock(order());
  return {kBytes - taken_[index], kBytes};
}

void Allocator::note(const Stream& stream, const char* begin, const char* end, bool writes, const std::string& what) {
  if (begin == end) return;
  const auto after = used_.upper_bound(begin);
  Block* const block = after == used_.begin() ? nullptr : std::prev(after)->second;
  if (block == nullptr || end > block->begin + block->size) {
    return report(what + " on " + stream.name() + " uses memory that was freed");
  }
  block->accesses.add(stream, begin, end, writes, what);
}

void Allocator::release(void* block) {
  if (block == nullptr) return;
  const std::lock_guard lock(order());
  allocator().give_back(*static_cast<Block*>(block));
}

void Allocator::give_back(Block& block) {
  block.is_free = true;
  if (block.graph != nullptr) return give_back_to_graph(block);
  join(block.stream->clock, host_clock());
  block.accesses.check_release(*block.stream, block.recorded);
  used_.erase(block.begin);
  spare_after(block, block.recorded);
}

// A later part of the recording may have the block, as on any stream. Freed after the recording, the block is as
// replays leave it.
void Allocator::give_back_to_graph(Block& block) {
  if (block.stream->recorder != block.graph || !block.recorded.empty()) return;
  const View all(block.begin, block.size);
  block.stream->recorder->add(*block.stream, {"a tensor's end", {{all, true}}, [all]() -> Task {
                                                return [all] { all.on_stream().fill_(0xFF); };
                                              }});
  spare_[{block.graph, block.stream, block.size}].push_back(&block);
}

// A point of a recording is none in time: what waits for one is not used again.
void Allocator::spare_after(Block& block, const std::set<Stream*>& streams) {
  if (streams.empty()) return make_spare(block);
  Points points;
  for (Stream* stream : streams) points.push_back(stream->mark());
  if (std::any_of(points.begin(), points.end(), [](const auto& point) { return point->recorded; })) return;
  waiting_.emplace_back(&block, std::move(points));
}

void Allocator::end_graph(const Graph& graph, const std::set<Stream*>& streams) {
  std::erase_if(spare_, [&](const auto& entry) { return std::get<0>(entry.first) == &graph; });
  for (auto entry = used_.begin(); entry != used_.end();) {
    Block& block = *entry->second;
    const bool was_its = std::exchange(block.graph, block.graph == &graph ? nullptr : block.graph) == &graph;
    if (was_its && block.is_free) {
      entry = used_.erase(entry);
      spare_after(block, streams);
    } else {
      ++entry;
    }
  }
}

void Allocator::make_spare(Block& block) {
  block.stream->queue([begin = block.begin, size = block.size] { std::memset(on_stream(begin), 0xFF, size); });
  block.recorded.clear();
  block.accesses.clear();
  spare_[{nullptr, block.stream, block.size}].push_back(&block);
}

void Allocator::reclaim() {
  std::erase_if(waiting_, [&](auto& entry) {
    auto& [block, points] = entry;
    if (!std::all_of(points.begin(), points.end(), [](const auto& point) { return point->passed(); })) return false;
    for (const auto& point : points) join(block->stream->clock, point->clock);  // the host has seen them pass
    make_spare(*block);
    return true;
  });
}

Allocator& allocator() {
  static auto* const allocator = new Allocator;
  return *allocator;
}

}  // namespace simulated

#include "graph.hpp"

#include "memory.hpp"
#include "reports.hpp"

namespace simulated {
namespace {

Graph*& recorded_by_this_thread() {
  thread_local Graph* graph = nullptr;
  return graph;
}

// Streams that no graph replays on now. Their threads never end.
Stream& take_branch(std::vector<Stream*>& spare, int device) {
  if (spare.empty()) return *new Stream(device, Device::kBranch);
  Stream* const stream = spare.back();
  spare.pop_back();
  return *stream;
}

std::vector<Stream*>& spare_branches(int device) {  // hold order()
  static auto* const spare = new std::map<int, std::vector<Stream*>>;
  return (*spare)[device];
}

}  // namespace

std::shared_ptr<Graph> Graph::begin(Stream& stream) {
  const std::lock_guard lock(order());
  TORCH_CHECK(stream.id != 0, "CUDA graphs must be captured on a non-default stream");
  TORCH_CHECK(stream.recorder == nullptr && recorded_by_this_thread() == nullptr, stream.name(),
              " or the calling thread is capturing already");
  auto graph = std::make_shared<Graph>(stream);
  graph->recording_ = true;
  graph->join_in(stream);
  recorded_by_this_thread() = graph.get();
  return graph;
}

void Graph::end() {
  const std::lock_guard lock(order());
  stop();
  TORCH_CHECK(wrong_.empty(), "operation failed due to a previous error during capture: ", wrong_);
  const Clock& seen = at_.at(&origin_);
  for (const auto& [stream, clock] : at_) {
    const auto last = clock.find(stream->number), joined = seen.find(stream->number);
    TORCH_CHECK(last == clock.end() || (joined != seen.end() && joined->second >= last->second),
                "capturing stream has unjoined work: ", origin_.name(), " does not wait for ", stream->name());
    if (stream != &origin_) branches_[stream] = &take_branch(spare_branches(stream->device), stream->device);
  }
}

void Graph::replay(Stream& stream) {
  const std::lock_guard lock(order());
  TORCH_CHECK(stream.recorder == nullptr, "the simulated device records no graph within a graph");
  ++counts().launches;
  Replay replay{branches_, {}};
  replay.streams[&origin_] = &stream;
  for (const auto& node : nodes_) node(replay);
  ran_on_.insert(&stream);
}

Graph::~Graph() {
  const std::lock_guard lock(order());
  stop();
  allocator().end_graph(*this, ran_on_);
  for (const auto& [stream, branch] : branches_) spare_branches(branch->device).push_back(branch);
}

void Graph::add(Stream& stream, const Launch& launch) {
  Clock& clock = at_.at(&stream);
  ++clock[stream.number];
  nodes_.emplace_back([recorded = &stream, launch](Replay& replay) { give(*replay.streams.at(recorded), launch); });
}

std::shared_ptr<Point> Graph::mark(Stream& stream) {
  const auto point = std::make_shared<Point>(at_.at(&stream), weak_from_this());
  nodes_.emplace_back([recorded = &stream, point](Replay& replay) {
    replay.points[point.get()] = replay.streams.at(recorded)->mark();
  });
  return point;
}

void Graph::follow(Stream& stream, const std::shared_ptr<Point>& point) {
  const auto graph = point->graph.lock();
  if (!point->recorded) {
    stream.recorder->refuse(stream.name() + " waits for an event from outside of the capture");
  }
  if (graph == nullptr || !graph->recording_) {
    TORCH_CHECK(false, stream.name(), " waits for an event of a capture that is over");
  }
  if (stream.recorder == nullptr) graph->join_in(stream);
  if (stream.recorder != graph.get()) graph->refuse(stream.name() + " waits for an event of another capture");
  join(graph->at_.at(&stream), point->clock);
  graph->nodes_.emplace_back([recorded = &stream, point](Replay& replay) {
    replay.streams.at(recorded)->follow(replay.points.at(point.get()));
  });
}

void Graph::check_wait(const Stream& stream) {
  if (stream.recorder != nullptr) stream.recorder->refuse("the host waits for " + stream.name());
  check_thread("the host waits for " + stream.name());
}

void Graph::check_wait(int index) {
  const std::string what = "the host waits for device " + std::to_string(index);
  for (const auto& stream : device(index).streams()) {
    if (stream->recorder != nullptr) stream->recorder->refuse(what);
  }
  check_thread(what);
}

void Graph::check_wait(const Point& point) {
  if (!point.recorded && recorded_by_this_thread() == nullptr) return;
  const std::string what = "the host asks for an event";
  const auto graph = point.graph.lock();
  const std::lock_guard lock(order());
  if (graph != nullptr) graph->refuse(what + " of the capture");
  TORCH_CHECK(!point.recorded, what, " that was last recorded in a capturing stream");
  check_thread(what);
}

void Graph::check_thread(const std::string& what) {
  if (Graph* const graph = recorded_by_this_thread()) graph->refuse(what);
}

void Graph::join_in(Stream& stream) {
  at_[&stream];
  stream.recorder = this;
}

void Graph::stop() {
  if (recorded_by_this_thread() == this) recorded_by_this_thread() = nullptr;
  recording_ = false;
  for (const auto& [stream, clock] : at_) {
    if (stream->recorder == this) stream->recorder = nullptr;
  }
}

void Graph::refuse(const std::string& what) {
  if (recording_ && wrong_.empty()) wrong_ = what;
  TORCH_CHECK(false, "operation not permitted when stream is capturing: ", what);
}

}  // namespace simulated

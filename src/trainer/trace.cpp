#include "trace.hpp"

#include <ATen/record_function.h>
#include <torch/csrc/autograd/profiler_kineto.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <limits>
#include <set>
#include <string_view>
#include <utility>

#include "io/atomic_file.hpp"
#include "ranks/rank_wait.hpp"

namespace lockstep {
namespace {

namespace profiler = torch::autograd::profiler;
using nlohmann::json;
using torch::profiler::impl::ActivityType;

// Threads that belong to no rank (CUDA's backward runs on such) and GPUs come after the ranks on the timeline.
constexpr int kOtherThreads = 1'000'000;
constexpr const char* kUpdateRange = "lockstep::update";
constexpr int kFirstGpu = 1'000'001;

double microseconds(uint64_t nanoseconds) {
  return static_cast<double>(nanoseconds) / 1e3;
}

bool is_of_a_step(const std::string& name) {
  return name == "lockstep::forward" || name == "lockstep::backward" || name == kUpdateRange ||
         name.starts_with("lockstep::bucket ");
}

json name_of_process(int process, const std::string& name) {
  return {{"ph", "M"}, {"name", "process_name"}, {"pid", process}, {"args", {{"name", name}}}};
}

torch::profiler::impl::ProfilerConfig config() {
  torch::profiler::impl::ExperimentalConfig details;
  details.profile_all_threads = true;  // otherwise only the thread that starts the profiler is seen
  return torch::profiler::impl::ProfilerConfig(torch::profiler::impl::ProfilerState::KINETO,
                                               /*report_input_shapes=*/false, /*profile_memory=*/false,
                                               /*with_stack=*/false, /*with_flops=*/false, /*with_modules=*/false,
                                               details);
}

std::set<ActivityType> activities(const Devices& devices) {
  std::set<ActivityType> types = {ActivityType::CPU};
  switch (devices[0].type()) {
    case c10::kCUDA:
      types.insert(ActivityType::CUDA);
      break;
    case c10::kXPU:
      types.insert(ActivityType::XPU);
      break;
    case c10::kPrivateUse1:
      types.insert(ActivityType::PrivateUse1);
      break;
    default:  // the profiler knows no others, and shows the host's side of the run
      break;
  }
  return types;
}

}  // namespace

std::filesystem::path trace_file(const std::filesystem::path& file, int process) {
  if (process == 0) return file;
  return std::filesystem::path(file).replace_filename(file.stem().string() + "." + std::to_string(process) +
                                                      file.extension().string());
}

Trace::Trace(std::filesystem::path file, const Devices& devices) : file_(std::move(file)), devices_(devices) {
  io::write_file(file_, "");  // fails now, and not after the traced steps
  profiler::prepareProfiler(config(), activities(devices_));
}

Trace::~Trace() {
  try {
    if (running_) profiler::disableProfiler();
  } catch (...) {  // nobody is left to tell
  }
}

void Trace::before_step(Rank& rank) {
  int64_t step;
  {
    const std::lock_guard lock(mutex_);
    rank_of_thread_[at::RecordFunction::currentThreadId()] = rank.index();
    names_[rank.index()] = "rank " + std::to_string(rank.index()) + " (" + rank.device().str() + ")";
    step = steps_[rank.index()]++;
  }
  if (step == kTraceAfterSteps) {
    rank.barrier();
    if (rank.index_in_process() == 0) start();
    rank.barrier();
  } else if (step == kTraceAfterSteps + kTracedSteps) {
    end(rank);
  }
}

void Trace::end(Rank& rank) {
  synchronize(rank);
  rank.barrier();
  if (rank.index_in_process() == 0 && running_) finish();
  rank.barrier();
}

void Trace::start() {
  profiler::enableProfiler(config(), activities(devices_));
  running_ = true;
}

void Trace::finish() {
  running_ = false;
  const auto result = profiler::disableProfiler();
  json events = json::array();
  for (const auto& [rank, name] : names_) events.push_back(name_of_process(rank, name));
  int64_t id = 0;
  for (const auto& event : result->events()) {
    const bool on_cpu = event.deviceType() == c10::DeviceType::CPU;
    const auto rank = rank_of_thread_.find(event.startThreadId());
    int process = kOtherThreads;
    if (!on_cpu) {
      process = kFirstGpu + event.deviceIndex();
    } else if (rank != rank_of_thread_.end()) {
      process = rank->second;
    }
    if (on_cpu && process < kOtherThreads && is_of_a_step(event.name())) {
      const auto seconds = [&](uint64_t time) { return 1e-9 * static_cast<double>(time - result->trace_start_ns()); };
      ranges_.push_back({process, event.name(), seconds(event.startNs()), seconds(event.endNs())});
    }
    const json common = {{"name", event.name()},
                         {"pid", process},
                         {"tid", on_cpu ? static_cast<int64_t>(event.startThreadId()) : event.deviceResourceId()}};
    const auto add = [&](const char* phase, uint64_t time, const json& more) {
      json entry = common;
      entry["ph"] = phase;
      entry["ts"] = microseconds(time - result->trace_start_ns());
      entry.update(more);
      events.push_back(std::move(entry));
    };
    if (event.isAsync()) {  // a bucket need not end before events that began later
      const json async = {{"cat", "bucket"}, {"id", ++id}};
      add("b", event.startNs(), async);
      add("e", event.endNs(), async);
    } else {
      add("X", event.startNs(), {{"cat", on_cpu ? "cpu" : "gpu"}, {"dur", microseconds(event.durationNs())}});
    }
  }
  events.push_back(name_of_process(kOtherThreads, "other threads"));
  io::write_file(file_, json{{"displayTimeUnit", "ms"}, {"traceEvents", std::move(events)}}.dump());
  written_ = true;
}

// Each rank's step ends with the end of an update, and begins where the one before ended. A rank may be ahead of
// another.
nlohmann::ordered_json Trace::step() const {
  std::map<int, std::vector<double>> ends;
  for (const auto& range : ranges_) {
    if (range.name == kUpdateRange) ends[range.rank].push_back(range.end);
  }
  if (ends.empty() || ends.begin()->second.size() < 2) return nullptr;
  const size_t last = ends.begin()->second.size() / 2;
  double begin = std::numeric_limits<double>::infinity(), end = 0;
  for (auto& [rank, of_rank] : ends) {
    std::sort(of_rank.begin(), of_rank.end());
    if (of_rank.size() <= last) continue;
    begin = std::min(begin, of_rank[last - 1]);
    end = std::max(end, of_rank[last]);
  }
  nlohmann::ordered_json step = {{"seconds", end - begin}, {"ranks", nlohmann::ordered_json::object()}};
  for (const auto& range : ranges_) {
    const auto& of_rank = ends[range.rank];
    if (of_rank.size() <= last || range.begin < of_rank[last - 1] || range.begin >= of_rank[last]) continue;
    step["ranks"][std::to_string(range.rank)].push_back(
        {range.name.substr(std::string_view("lockstep::").size()), range.begin - begin, range.end - range.begin});
  }
  return step;
}

}  // namespace lockstep

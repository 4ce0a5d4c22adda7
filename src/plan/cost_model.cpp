#include "cost_model.hpp"

#include <lockstep/base/error.hpp>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <string>

namespace lockstep {
namespace {

// DataParallel's buckets have this size: one collective sums so many bytes of gradients.
constexpr double bucket_bytes = 4 << 20;

// Counts, for each stage of rank `p`, the most microbatches whose activations it holds at once.
std::map<int, int> most_live(const ModelSplit& split, int p, int ranks) {
  std::map<int, int> live, most;
  for (const auto& step : steps_of(split.schedule, p, ranks, split.stages_per_rank, split.microbatches)) {
    live[step.stage] += step.kind == PipelineStep::Kind::forward ? 1 : -1;
    most[step.stage] = std::max(most[step.stage], live[step.stage]);
  }
  return most;
}

}  // namespace

CostModel::CostModel(const ModelProfile& profile, const Cluster& cluster, const TrainingCost& training,
                     const MeshShape& mesh, int64_t batch_size)
    : profile_(profile),
      cluster_(cluster),
      training_(training),
      mesh_(mesh),
      layers_(layers_of(profile, mesh.tensor)),
      part_((batch_size + mesh.data - 1) / mesh.data),
      columns_(static_cast<size_t>(mesh.pipeline)) {
  const int64_t ranks = static_cast<int64_t>(mesh.data) * mesh.pipeline * mesh.tensor;
  if (ranks > static_cast<int64_t>(cluster.devices.size())) {
    throw Error("a mesh of " + to_string(mesh) + " needs " + std::to_string(ranks) + " devices; there are " +
                std::to_string(cluster.devices.size()));
  }
  for (int d = 0; d < mesh.data; ++d) {
    for (int p = 0; p < mesh.pipeline; ++p) {
      for (int t = 0; t < mesh.tensor; ++t) {
        const auto& here = cluster.devices[static_cast<size_t>(device(d, p, t))];
        Column& column = columns_[static_cast<size_t>(p)];
        column.speed = column.speed == 0 ? here.speed : std::min(column.speed, here.speed);
        if (here.memory_bytes > 0) {
          column.memory_bytes =
              column.memory_bytes == 0 ? here.memory_bytes : std::min(column.memory_bytes, here.memory_bytes);
        }
      }
    }
  }
  for (int p = 0; p < mesh.pipeline; ++p) columns_[static_cast<size_t>(p)].node = cluster.node_of(device(0, p, 0));
  const auto links = [&](auto neighbour) { return crosses_nodes(neighbour) ? cluster.between : cluster.within; };
  data_ = links([&](int d, int p, int t) { return device((d + 1) % mesh_.data, p, t); });
  pipeline_ = links([&](int d, int p, int t) { return device(d, (p + 1) % mesh_.pipeline, t); });
  tensor_ = links([&](int d, int p, int t) { return device(d, p, (t + 1) % mesh_.tensor); });
  const auto of_first = std::count_if(columns_.begin(), columns_.end(), [](const Column& c) { return c.node == 0; });
  copies_ = std::max(1, static_cast<int>(std::min<int64_t>(ranks, cluster.devices_per_node) / of_first));
}

// Tells whether any device has its neighbour in another node.
bool CostModel::crosses_nodes(const std::function<int(int, int, int)>& neighbour) const {
  for (int d = 0; d < mesh_.data; ++d) {
    for (int p = 0; p < mesh_.pipeline; ++p) {
      for (int t = 0; t < mesh_.tensor; ++t) {
        if (cluster_.node_of(device(d, p, t)) != cluster_.node_of(neighbour(d, p, t))) return true;
      }
    }
  }
  return false;
}

double CostModel::seconds(const LayerMessage& message, double samples) const {
  const double bytes = message.bytes + message.bytes_per_sample * samples;
  return message.kind == LayerMessage::Kind::allreduce ? allreduce_seconds(tensor_.allreduce, mesh_.tensor, bytes)
                                                       : allgather_seconds(tensor_.allgather, mesh_.tensor, bytes);
}

double CostModel::seconds(const std::vector<LayerMessage>& messages, double samples) const {
  double sum = 0;
  for (const auto& message : messages) sum += seconds(message, samples);
  return sum;
}

// Returns the bytes that one rank sends; collectives run in rings.
double CostModel::sent_bytes(const std::vector<LayerMessage>& messages, double samples) const {
  double sum = 0;
  for (const auto& message : messages) {
    const double rounds = message.kind == LayerMessage::Kind::allreduce ? 2 : 1;
    sum += rounds * (mesh_.tensor - 1) / mesh_.tensor * (message.bytes + message.bytes_per_sample * samples);
  }
  return sum;
}

std::vector<CostModel::Stage> CostModel::stages(const std::vector<int64_t>& cuts) const {
  std::vector<Stage> stages;
  const auto layers = static_cast<int64_t>(layers_.size());
  for (size_t s = 0; s <= cuts.size(); ++s) {
    Stage stage{.first = s == 0 ? 0 : cuts[s - 1], .end = s == cuts.size() ? layers : cuts[s]};
    for (int64_t i = stage.first; i < stage.end; ++i) {
      const auto& layer = layers_[static_cast<size_t>(i)];
      stage.parameter_bytes += layer.parameter_bytes;
      stage.buffer_bytes += layer.buffer_bytes;
      stage.saved_bytes += layer.saved_bytes;
    }
    if (s > 0) stage.input_bytes = layers_[static_cast<size_t>(stage.first) - 1].output_bytes;
    stages.push_back(stage);
  }
  stages.back().saved_bytes += profile_.loss.saved_bytes;
  return stages;
}

// Returns the times of a microbatch of `samples` in a stage that lives on rank p.
PipelineRun::Stage CostModel::run_of(const Stage& stage, int p, double samples, bool recompute) const {
  const bool is_last = stage.end == static_cast<int64_t>(layers_.size());
  PipelineRun::Stage run;
  for (int64_t i = stage.first; i < stage.end; ++i) {
    const auto& layer = layers_[static_cast<size_t>(i)];
    run.forward += layer.forward.at(samples);
    run.backward += layer.backward.at(samples);
    run.forward_messages += seconds(layer.forward_messages, samples);
    run.backward_messages += seconds(layer.backward_messages, samples);
  }
  if (recompute) {
    run.backward += run.forward;
    run.backward_messages += run.forward_messages;
  }
  if (is_last) {
    run.forward += profile_.loss.forward.at(samples);
    run.backward += profile_.loss.backward.at(samples);
  } else {
    run.send_forward = pipeline_.send.seconds(layers_[static_cast<size_t>(stage.end) - 1].output_bytes * samples);
  }
  if (stage.first > 0) run.send_backward = pipeline_.send.seconds(stage.input_bytes * samples);
  if (mesh_.pipeline == 1) run.send_forward = run.send_backward = 0;
  const double speed = columns_[static_cast<size_t>(p)].speed;
  run.forward /= speed;
  run.backward /= speed;
  return run;
}

Partition CostModel::partition(const ModelSplit& split) const {
  const double samples = static_cast<double>(part_) / split.microbatches;
  Partition partition;
  for (const auto& layer : layers_) {
    const double forward = layer.forward.at(samples) + seconds(layer.forward_messages, samples);
    const double backward = layer.backward.at(samples) + seconds(layer.backward_messages, samples);
    const double output = layer.output_bytes * samples, saved = layer.saved_bytes * samples;
    const double crossing = mesh_.pipeline == 1 ? 0 : 2 * pipeline_.send.seconds(output);
    partition.layers.push_back({
        .seconds = (split.recompute ? 2 : 1) * forward + backward,
        .cut_seconds = crossing,
        // With recompute only one microbatch's activations are there.
        .fixed_bytes = layer.parameter_bytes * (2 + training_.state_bytes_per_parameter_byte) + layer.buffer_bytes +
                       (split.recompute ? saved : 0),
        .live_bytes = split.recompute ? 0 : saved,
        .cut_bytes = output,
        // This assumes that all later layers keep their bytes. workspace_bytes() knows the layers, and needs less.
        .workspace_bytes = layer.fixed_workspace_bytes + layer.workspace_bytes * samples,
    });
  }
  auto& last = partition.layers.back();
  last.seconds += profile_.loss.forward.at(samples) + profile_.loss.backward.at(samples);
  (split.recompute ? last.fixed_bytes : last.live_bytes) += profile_.loss.saved_bytes * samples;
  last.workspace_bytes =
      std::max(last.workspace_bytes, profile_.loss.fixed_workspace_bytes + profile_.loss.workspace_bytes * samples);

  partition.stages.resize(static_cast<size_t>(mesh_.pipeline) * static_cast<size_t>(split.stages_per_rank));
  const double batch = profile_.input_bytes * static_cast<double>(part_);
  for (int p = 0; p < mesh_.pipeline; ++p) {
    const Column& column = columns_[static_cast<size_t>(p)];
    for (const auto& [stage, live] : most_live(split, p, mesh_.pipeline)) {
      auto& device = partition.stages[static_cast<size_t>(stage)];
      device.speed = column.speed;
      device.live_microbatches = live;
      // It is at least 1, since 0 would mean "no limit". A device too small for the batch is then reported like any
      // other.
      if (column.memory_bytes > 0)
        device.memory_bytes = std::max(1.0, column.memory_bytes - batch) / split.stages_per_rank;
    }
  }
  return partition;
}

// Returns the most bytes that a layer of the stage needs beyond those that all its layers keep. While a layer runs,
// forward or backward, the layers behind it keep nothing.
double CostModel::workspace_bytes(const Stage& stage, double samples) const {
  double most = 0, absent = 0;
  const auto add = [&](const LayerProfile& layer) {
    most = std::max(most, layer.fixed_workspace_bytes + layer.workspace_bytes * samples - absent);
    absent += layer.saved_bytes * samples;
  };
  if (stage.end == static_cast<int64_t>(layers_.size())) add(profile_.loss);
  for (int64_t i = stage.end; i-- > stage.first;) add(layers_[static_cast<size_t>(i)]);
  return most;
}

// Returns the most bytes of activations at once.
double CostModel::live_bytes(const Candidate& candidate, int p) const {
  double live = 0, peak = 0;
  for (const auto& step : steps_of(candidate.split.schedule, p, mesh_.pipeline, candidate.split.stages_per_rank,
                                   candidate.split.microbatches)) {
    const Stage& stage = candidate.stages[static_cast<size_t>(step.stage)];
    const double kept = (stage.input_bytes + (candidate.split.recompute ? 0 : stage.saved_bytes)) * candidate.samples;
    const double now = (candidate.split.recompute ? stage.saved_bytes : 0) * candidate.samples;  // the running step's
    if (step.kind == PipelineStep::Kind::forward) live += kept;
    peak = std::max(peak, live + now);
    if (step.kind == PipelineStep::Kind::backward) live -= kept;
  }
  return peak;
}

double CostModel::memory_bytes(const Candidate& candidate, int p) const {
  double fixed = profile_.input_bytes * static_cast<double>(part_), workspace = 0;
  for (size_t s = static_cast<size_t>(p); s < candidate.stages.size(); s += static_cast<size_t>(mesh_.pipeline)) {
    fixed += candidate.stages[s].parameter_bytes * (2 + training_.state_bytes_per_parameter_byte) +
             candidate.stages[s].buffer_bytes;
    workspace = std::max(workspace, workspace_bytes(candidate.stages[s], candidate.samples));
  }
  return fixed + live_bytes(candidate, p) + workspace;
}

// Returns the bytes that rank p sends in a step.
double CostModel::bytes_sent(const Candidate& candidate, int p) const {
  double sent = 0;
  for (size_t s = static_cast<size_t>(p); s < candidate.stages.size(); s += static_cast<size_t>(mesh_.pipeline)) {
    const Stage& stage = candidate.stages[s];
    sent += 2.0 * (mesh_.data - 1) / mesh_.data * stage.parameter_bytes;
    double per_microbatch = 0;
    for (int64_t i = stage.first; i < stage.end; ++i) {
      const auto& layer = layers_[static_cast<size_t>(i)];
      per_microbatch += (candidate.split.recompute ? 2 : 1) * sent_bytes(layer.forward_messages, candidate.samples) +
                        sent_bytes(layer.backward_messages, candidate.samples);
    }
    if (mesh_.pipeline > 1 && s + 1 < candidate.stages.size()) {
      per_microbatch += layers_[static_cast<size_t>(stage.end) - 1].output_bytes * candidate.samples;
    }
    if (mesh_.pipeline > 1 && s > 0) per_microbatch += stage.input_bytes * candidate.samples;
    sent += per_microbatch * candidate.split.microbatches;
  }
  return sent;
}

// Returns the seconds of summing `bytes` of gradients that remain after a backward of `backward` seconds.
double CostModel::exposed_allreduce(double bytes, double backward) const {
  if (mesh_.data == 1 || bytes == 0) return 0;
  const double buckets = std::ceil(bytes / bucket_bytes);
  const double bucket = allreduce_seconds(data_.allreduce, mesh_.data, bytes / buckets);
  // The first layer's gradient comes last: its bucket has nothing left to hide behind.
  return std::max(buckets * bucket - cluster_.overlap * backward, bucket);
}

Prediction CostModel::predict(const ModelSplit& split) const {
  const Candidate candidate{split, stages(split.cuts), static_cast<double>(part_) / split.microbatches};
  const std::vector<Stage>& stages = candidate.stages;
  PipelineRun run;
  run.schedule = split.schedule;
  run.ranks = mesh_.pipeline;
  run.stages_per_rank = split.stages_per_rank;
  run.microbatches = split.microbatches;
  run.copies = copies_;
  for (size_t s = 0; s < stages.size(); ++s) {
    const int p = static_cast<int>(s) % mesh_.pipeline;
    run.stages.push_back(run_of(stages[s], p, candidate.samples, split.recompute));
  }
  for (const auto& column : columns_) run.node.push_back(column.node);
  if (!cluster_.contention.empty()) run.slowdown = [this](double computing) { return cluster_.slowdown(computing); };
  const PipelineTimes times = simulate(run);

  const auto all = [](const std::vector<LayerProfile>& layers) {
    return std::accumulate(layers.begin(), layers.end(), 0.0,
                           [](double sum, const LayerProfile& layer) { return sum + layer.parameter_bytes; });
  };
  const double whole_bytes = all(profile_.layers);
  Prediction prediction;
  for (int p = 0; p < mesh_.pipeline; ++p) {
    const auto index = static_cast<size_t>(p);
    Prediction::RankCost share;
    double backward = 0;  // seconds of the last microbatch's backward, beside which gradients are summed
    for (size_t s = index; s < stages.size(); s += columns_.size()) {
      share.parameter_bytes += stages[s].parameter_bytes;
      backward += run.stages[s].backward;
    }
    const double members =
        copies_ * static_cast<double>(std::count_if(columns_.begin(), columns_.end(), [&](const Column& other) {
          return other.node == columns_[index].node;
        }));
    const double update = whole_bytes == 0 ? 0
                                           : profile_.update_seconds * share.parameter_bytes / whole_bytes /
                                                 columns_[index].speed * cluster_.slowdown(members);
    share.busy_seconds = times.busy[index] + update;
    share.memory_bytes = memory_bytes(candidate, p);
    share.bytes_sent = bytes_sent(candidate, p);
    prediction.step_seconds = std::max(
        prediction.step_seconds, times.finish[index] + exposed_allreduce(share.parameter_bytes, backward) + update);
    prediction.ranks.push_back(share);
  }
  return prediction;
}

}  // namespace lockstep

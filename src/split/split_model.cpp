#include <ATen/autocast_mode.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <lockstep/base/error.hpp>
#include <lockstep/devices/autocast.hpp>
#include <lockstep/split/split_model.hpp>

#include "data_parallel/loss_part.hpp"
#include "data_parallel/replica.hpp"
#include "data_parallel/trained_net.hpp"
#include "pipeline/pipeline.hpp"
#include "pipeline/pipeline_checks.hpp"
#include "pipeline/split_into_stages.hpp"
#include "ranks/gather.hpp"
#include "split_optimizer_state.hpp"
#include "tensor_parallel/shard.hpp"

#include <utility>

namespace lockstep {
namespace {

ModelSplit checked(const ModelSplit& split, const torch::nn::Sequential& net, const Rank& rank) {
  if (net.is_empty()) throw Error(rank.name() + ": SplitModel: the net is null; build it first");
  check_split(split, static_cast<int64_t>(net->size()));
  if (split.recompute) check_recomputable(net);  // shard() would hide the modules' types
  return split;
}

// Makes the pipeline, or null if none is needed. With a pipeline `net` becomes this rank's layers of the network.
std::shared_ptr<Pipeline> by_layers(torch::nn::Sequential& net, Mesh& mesh, const ModelSplit& split) {
  if (split.stages() == 1 && split.microbatches == 1) return nullptr;
  auto pipeline = std::make_shared<Pipeline>(split_into_stages(net, split), mesh.pipeline(), split);
  net = pipeline->module();
  return pipeline;
}

// Throws Error if ranks that hold slices of the same layers have different samples.
void compare_batches(Rank& tensor, const Batch& batch) {
  const at::Tensor all = of_all_ranks(tensor, {batch.size(), batch.mark});
  for (int other = 0; other < tensor.world_size(); ++other) {
    const auto their_size = all[other][0].item<int64_t>(), their_mark = all[other][1].item<int64_t>();
    const bool known = batch.mark != 0 && their_mark != 0;
    if (their_size == batch.size() && (!known || their_mark == batch.mark)) continue;
    throw Error(
        tensor.name() + ": SplitModel: the ranks that split layers by channels pass different batches: here " +
            std::to_string(batch.size()) + " samples, at the group's rank " + std::to_string(other) + " " +
            std::to_string(their_size) + (their_size == batch.size() ? " of another batch" : "") +
            ". Give batches() the mesh's data axis, and the same data, seed, epoch and shuffle on all ranks, and "
            "take as many batches everywhere",
        {Error::difference});
  }
}

// Wraps a function for backward() to call with the Autocast that is on when loss() is called.
template <class Function>
auto with_autocast_of_now(const c10::Device& device, Function function) {
  return [device, type = at::autocast::get_autocast_dtype(device.type()),
          is_on = at::autocast::is_autocast_enabled(device.type()),
          function = std::move(function)](const auto&... arguments) mutable -> torch::Tensor {
    const Autocast as_then(device, type, is_on);
    return function(arguments...);
  };
}

// Copies rank `owner`'s values of a stage's tensors to all ranks of the pipeline.
void broadcast_stage(torch::nn::Sequential& stage, Rank& pipeline, int owner) {
  auto tensors = stage->parameters();
  const auto buffers = stage->buffers();
  tensors.insert(tensors.end(), buffers.begin(), buffers.end());
  for (const auto& tensor : tensors) {
    const torch::Tensor there = tensor.detach().to(pipeline.device());
    pipeline.broadcast(there, owner);
    tensor.copy_(there);
  }
}

}  // namespace

SplitModel::SplitModel(const torch::nn::Sequential& net, Rank& rank, const ModelSplit& split,
                       const DataParallelOptions& options, bool takes_batch)
    : split_(checked(split, net, rank)),
      takes_batch_(takes_batch),
      mesh_(rank, split.mesh),
      module_(mesh_.tensor().world_size() == 1 ? net : shard(net, mesh_.tensor(), split_.tensor_rule)),
      pipeline_(by_layers(module_, mesh_, split_)),
      replicas_(module_.ptr(), mesh_.data(), options) {
  if (takes_batch && (pipeline_ || mesh_.tensor().world_size() > 1)) {
    throw Error(rank.name() +
                ": SplitModel: the net's forward takes a Batch, and a split by layers or channels needs layers of "
                "tensors; split it by data alone");
  }
  if (mesh_.shape().size() > mesh_.shape().data) replicas_.replica()->become_part();
}

// Stages lie on the pipeline's ranks, and slices of layers on the tensor axis; what that axis holds whole counts once.
class SplitModel::Trained final : public TrainedNet {
 public:
  explicit Trained(const SplitModel& net)
      : TrainedNet(net.replicas_.replica()), net_(net), sliced_(sliced_dimensions_of(net.module_)) {}

  std::vector<Rank*> other_parts() override {
    std::vector<Rank*> groups;
    for (Rank* const axis : {&net_.mesh_.tensor(), &net_.mesh_.pipeline()}) {
      if (axis->world_size() > 1) groups.push_back(axis);
    }
    return groups;
  }
  bool counts(const std::string& parameter) override {
    return net_.mesh_.tensor().index() == 0 || sliced_.contains(parameter);
  }
  bool slices_layers() override { return net_.mesh_.tensor().world_size() > 1; }
  bool is_first() override {
    return net_.mesh_.data().index() == 0 && net_.mesh_.pipeline().index() == 0 && net_.mesh_.tensor().index() == 0;
  }
  io::NamedTensors joined(io::NamedTensors state) override {
    return joined_state(std::move(state), net_.module_, net_.mesh_);
  }
  io::NamedTensors part_of(io::NamedTensors state) override {
    return held_state(std::move(state), net_.module_, net_.mesh_);
  }

 private:
  SplitModel net_;
  const decltype(sliced_dimensions_of(torch::nn::Sequential())) sliced_;
};

std::shared_ptr<TrainedNet> SplitModel::trained() const {
  return std::make_shared<Trained>(*this);
}

Loss SplitModel::loss(const Batch& batch, const Criterion& criterion) {
  if (criterion.of() && !batch.samples_per_count.defined())
    return loss(replicas_.replica()->counts().counted(batch, criterion.of()), criterion);
  Rank& tensor = mesh_.tensor();
  if (tensor.world_size() > 1 && (tensor.device().is_cpu() || checked_ < kChecksOnGpu)) {
    ++checked_;
    compare_batches(tensor, batch);
  }
  if (batch.grain > 0 && tensor.world_size() > 1) {
    throw Error(
        tensor.name() +
        ": SplitModel: with a grain the results must not depend on the number of ranks, and sums over slices of "
        "layers do. Split by data and layers alone, or leave out BatchOptions::grain");
  }
  const auto& replica = replicas_.replica();
  if (pipeline_) {
    const auto both = [pipeline = pipeline_, replica, batch, criterion] {
      return pipeline->forward_backward(batch, criterion, replica);
    };
    return interleaved_loss_of(replica, batch, with_autocast_of_now(tensor.device(), both));
  }
  const auto mean_of = [net = replicas_, criterion, takes_batch = takes_batch_](const Batch& part) mutable {
    RECORD_USER_SCOPE("lockstep::forward");
    const torch::Tensor y_hat = takes_batch ? net(part) : net(part.x);
    return part.size() > 0 ? net.replica()->criteria().loss(criterion, y_hat, part) : y_hat.sum();
  };
  return batch.grain > 0 ? late_loss_of(replica, batch, with_autocast_of_now(tensor.device(), mean_of))
                         : loss_of(replica, batch, mean_of);
}

torch::Tensor SplitModel::forward(const torch::Tensor& x) {
  const torch::NoGradGuard no_grad;
  return pipeline_ ? pipeline_->forward(x) : module_->forward(x);
}

torch::Tensor SplitModel::forward(const Batch& batch) {
  if (!takes_batch_) return forward(batch.x);
  const torch::NoGradGuard no_grad;
  return module_->forward(batch);
}

void SplitModel::gather(torch::nn::Sequential& net) {
  const torch::NoGradGuard no_grad;
  auto stages = split_into_stages(net, checked(split_, net, mesh_.data()));
  for (size_t stage = 0; stage < stages.size(); ++stage) {
    const int owner = static_cast<int>(stage) % split_.mesh.pipeline;
    if (owner == mesh_.pipeline().index()) unshard(module_, mesh_.tensor(), stages[stage]);
    broadcast_stage(stages[stage], mesh_.pipeline(), owner);
  }
}

}  // namespace lockstep

#include "net_optimizer.hpp"

#include <ATen/ops/zeros.h>
#include <lockstep/base/error.hpp>
#include <lockstep/optim/layer_wise.hpp>

#include "averaged_gradients.hpp"
#include "base/number_text.hpp"
#include "hidden_gradients.hpp"
#include "io/checked_tensors.hpp"
#include "optim/fused_optimizers.hpp"
#include "optim/made_optimizer.hpp"
#include "optim/optimizer_state.hpp"
#include "ranks/gather.hpp"
#include "ranks/rank_place.hpp"
#include "replica_check.hpp"
#include "sharded_state.hpp"

#include <bit>
#include <map>
#include <set>
#include <utility>

namespace lockstep {
namespace {

constexpr const char* kOptionsKey = "options";  // the key of the options in the file's metadata

Optimizer::Groups groups_of(const Replica& replica, const Optimizer::Grouping& grouping) {
  if (grouping) return grouping(replica.module());
  std::vector<at::Tensor> all;
  for (const auto& [name, parameter] : parameters_of(replica.module())) all.push_back(parameter);
  Optimizer::Groups groups;
  groups.emplace_back(std::move(all));
  return groups;
}

// Refuses Lars and Lamb on slices: they would scale by the norm of a slice.
void check_value_by_value(const torch::optim::Optimizer& optimizer, const std::string& name) {
  for (const auto& group : optimizer.param_groups()) {
    if (dynamic_cast<const LayerWise*>(&group.options()) == nullptr) continue;
    throw Error(name +
                ": Lars and Lamb scale by the norm of whole layers, and here ranks have slices of layers; take another "
                "optimizer, or a net that is not sharded or split by channels");
  }
}

std::unique_ptr<torch::optim::Optimizer> made(TrainedNet& net, const Optimizer::Make& make,
                                              const Optimizer::Groups& groups, const std::string& name) {
  const auto& sharded = net.replica()->sharded();
  check_groups(groups, parameters_of(net.replica()->module()), name);
  const Optimizer::Groups here = sharded ? sharded->sliced(groups) : groups;
  auto optimizer = checked_optimizer(make(here), tensors_in(here), name, sharded ? "slices" : "parameters");
  if (sharded || net.slices_layers()) check_value_by_value(*optimizer, name);
  return optimizer;
}

void add_name(std::string& names, const std::string& name) {
  names += (names.empty() ? "" : ", ") + name;
}

// Leaves out the state of parameters that are frozen now, but for `kept_ones`, and warns of it.
io::NamedTensors without_frozen(const io::NamedTensors& state, const Replica& replica, const std::string& owner,
                                const std::vector<at::Tensor>& kept_ones = {}) {
  std::set<const c10::TensorImpl*> held;
  for (const auto& parameter : kept_ones) held.insert(parameter.unsafeGetTensorImpl());
  std::set<std::string> frozen;
  for (const auto& [name, parameter] : parameters_of(replica.module())) {
    if (!parameter.requires_grad() && !held.contains(parameter.unsafeGetTensorImpl())) frozen.insert(name);
  }
  io::NamedTensors kept;
  std::string left_out;
  for (const auto& [name, tensor] : state) {
    if (!frozen.contains(parts_of_state_name(name).second)) {
      kept.emplace_back(name, tensor);
    } else {
      add_name(left_out, name);
    }
  }
  if (!left_out.empty() && replica.rank().index() == 0)
    comm::RankPlace::of(replica.rank())
        .warn(owner + ": state of parameters that are frozen now is left out: " + left_out);
  return kept;
}

void tell_of_new_ones(const io::NamedTensors& state, const Replica& replica, const std::string& owner) {
  if (state.empty() || replica.rank().index() != 0) return;
  std::set<std::string> known;
  for (const auto& [name, tensor] : state) known.insert(parts_of_state_name(name).second);
  std::string names;
  for (const auto& [name, parameter] : parameters_of(replica.module())) {
    if (parameter.requires_grad() && !known.contains(name)) add_name(names, name);
  }
  if (!names.empty())
    comm::RankPlace::of(replica.rank())
        .warn(owner + ": the file has no state of these parameters, which begin anew: " + names);
}

// Gives tensors of the shapes of the network's trained parameters, on all ranks alike. Call it on all ranks.
std::map<std::string, at::Tensor> shapes_of(TrainedNet& net) {
  io::NamedTensors mine;
  for (const auto& [name, parameter] : parameters_of(net.replica()->module())) {
    if (parameter.requires_grad())
      mine.emplace_back("of." + name, at::zeros(parameter.sizes(), parameter.options().dtype(at::kByte)));
  }
  std::map<std::string, at::Tensor> shapes;
  for (const auto& [name, shape] : net.joined(mine)) shapes.emplace(parts_of_state_name(name).second, shape);
  return shapes;
}

// Takes what does not fit out of `state`. A member of one number, such as a count of steps, fits.
UnmatchedNames take_out_unmatched(io::NamedTensors& state, const std::map<std::string, at::Tensor>& shapes) {
  std::set<std::string> matched, unexpected;
  for (const auto& [name, tensor] : state) {
    const std::string parameter = parts_of_state_name(name).second;
    const auto shape = shapes.find(parameter);
    const bool fits = shape != shapes.end() && (tensor.numel() == 1 || tensor.sizes() == shape->second.sizes());
    (fits ? matched : unexpected).insert(parameter);
  }
  std::erase_if(state, [&](const auto& named) { return unexpected.contains(parts_of_state_name(named.first).second); });
  UnmatchedNames unmatched{.missing = {}, .unexpected = {unexpected.begin(), unexpected.end()}};
  for (const auto& [name, shape] : shapes) {
    if (!matched.contains(name) || unexpected.contains(name)) unmatched.missing.push_back(name);
  }
  return unmatched;
}

// Sets the weight decay if the options are of one of these types; tells whether they are.
template <class... Types>
bool set_weight_decay_of(torch::optim::OptimizerOptions& options, double weight_decay) {
  const auto set = [&](auto* own) {
    if (own == nullptr) return false;
    if constexpr (requires { own->set_weight_decay(weight_decay); }) {
      own->set_weight_decay(weight_decay);
    } else {
      own->weight_decay(weight_decay);
    }
    return true;
  };
  return (set(dynamic_cast<Types*>(&options)) || ...);
}

// LibTorch's fused kernels round once where its operators round one after the other. On a CPU the results stay those of
// LibTorch's optimizers to the last bit.
template <class Fused, class Plain>
Optimizer::Make fused_on_gpu(const auto& options) {
  return [options](Optimizer::Groups groups) -> std::unique_ptr<torch::optim::Optimizer> {
    const std::vector<at::Tensor> tensors = tensors_in(groups);
    if (tensors.empty() || tensors[0].is_cpu()) return std::make_unique<Plain>(std::move(groups), options);
    return std::make_unique<Fused>(std::move(groups), options);
  };
}

}  // namespace

Optimizer::Make Optimizer::fused_maker(const torch::optim::SGDOptions& options) {
  return fused_on_gpu<FusedSgd, torch::optim::SGD>(options);
}

Optimizer::Make Optimizer::fused_maker(const torch::optim::AdamOptions& options) {
  return fused_on_gpu<FusedAdam, torch::optim::Adam>(options);
}

Optimizer::Make Optimizer::fused_maker(const torch::optim::AdamWOptions& options) {
  return fused_on_gpu<FusedAdamW, torch::optim::AdamW>(options);
}

Optimizer::Optimizer(std::shared_ptr<TrainedNet> net, const Make& make, const Grouping& grouping,
                     const std::string& owner)
    : net_(std::move(net)),
      sharded_(net_->replica()->sharded()),
      name_(net_->replica()->rank().name() + ": " + owner),
      inner_(made(*net_, make, groups_of(*net_->replica(), grouping), name_)) {
  net_->replica()->add_optimizer();
}

Optimizer::~Optimizer() {
  net_->replica()->remove_optimizer();
}

// ---- A step.

void Optimizer::zero_grad(bool in_place) {
  if (sharded_) return sharded_->reducer()->zero_grad();
  if (auto* const hidden = net_->replica()->hidden_gradients()) hidden->set_used(false);
  const HiddenGradients::Shown gradients(net_->replica()->hidden_gradients());
  std::vector<at::Tensor> parameters = net_->replica()->module().parameters();
  for (auto& parameter : parameters) {  // a frozen parameter's zeros would let momentum and decay move it
    if (!in_place || !parameter.requires_grad()) parameter.mutable_grad().reset();
  }
  if (in_place) zero_gradients(parameters);
}

at::Tensor Optimizer::clip(double max_norm) {
  return clip_gradients(*net_, max_norm);
}

void Optimizer::update() {
  if (sharded_) return sharded_->update([this] { inner_->step(); });
  if (auto* const hidden = net_->replica()->hidden_gradients()) hidden->set_used(true);
  const HiddenGradients::Shown gradients(net_->replica()->hidden_gradients());
  inner_->step();
}

void Optimizer::begin_step(const StepOptions& options) {
  if (!(options.clip >= 0)) {
    throw Error(name_ + ": `clip`, the largest norm, is " + number_text(options.clip) +
                "; it must be above 0, or 0: none");
  }
  if (!std::has_single_bit(++steps_)) return;
  if (!sharded_) check_groups(inner_->param_groups(), parameters_of(net_->replica()->module()), name_);
  compare_options(options);
}

Step Optimizer::step(const StepOptions& options) {
  begin_step(options);
  Step step;
  if (options.skip_not_finite && !has_finite_gradients(*net_)) {
    zero_grad();
    step.taken = false;
    return step;
  }
  if (options.clip > 0) step.norm = clip(options.clip);
  update();
  return step;
}

// Ranks with different options would train different networks, or, where each updates its slice, a wrong one.
void Optimizer::compare_options(const StepOptions& of_step) const {
  std::vector<Rank*> groups = net_->other_parts();
  if (net_->replica()->rank().world_size() > 1) groups.push_back(&net_->replica()->rank());
  if (groups.empty()) return;
  const std::string mine = options_text(*inner_) + ", clip " + number_text(of_step.clip) +
                           (of_step.skip_not_finite ? ", skip_not_finite" : "");
  for (Rank* const group : groups) {
    const auto theirs = texts_of_all_ranks(mine, *group);
    for (size_t other = 0; other < theirs.size(); ++other) {
      if (theirs[other] == mine) continue;
      throw Error(name_ + ": the ranks step with different options: here " + mine + ", at the group's rank " +
                      std::to_string(other) + " " + theirs[other] +
                      ". Set the same on all ranks; what follows from a loss must follow from Loss::global_item()",
                  {Error::difference});
    }
  }
}

void check_replicas(const Optimizer& optimizer) {
  compare_replicas(*optimizer.net_, optimizer.inner_.get());
}

std::vector<at::Tensor> Optimizer::gradients() const {
  std::vector<at::Tensor> gradients;
  for (const auto& [name, gradient] : averaged_gradients_of(*net_->replica())) gradients.push_back(gradient);
  return gradients;
}

// ---- Its state.

io::NamedTensors Optimizer::state() const {
  Replica& replica = *net_->replica();
  if (sharded_) return net_->joined(whole_state(*inner_, sharded_->buckets(), replica.rank()));
  return net_->joined(optimizer_state(*inner_, parameters_of(replica.module())));
}

// A run that goes on may unfreeze parameters later.
void Optimizer::load_state(const io::NamedTensors& state) {
  const auto kept = sharded_ ? std::vector<at::Tensor>() : tensors_in(inner_->param_groups());
  const io::NamedTensors mine = without_frozen(net_->part_of(state), *net_->replica(), name_, kept);
  if (sharded_) return load_slices_of_state(*inner_, sharded_->buckets(), mine);
  load_optimizer_state(*inner_, parameters_of(net_->replica()->module()), mine);
}

void Optimizer::save(const std::filesystem::path& file) {
  if (net_->replica()->averaging() == nullptr && net_->replica()->rank().world_size() > 1) {
    throw Error(name_ +
                ": save: with DataParallelOptions::average = false each rank's optimizer has a state of its own, and a "
                "file would hold one of them");
  }
  const io::NamedTensors whole = state();
  if (net_->is_first()) io::write_checked(file, whole, {{kOptionsKey, options_text(*inner_)}});
  for (Rank* const group : net_->other_parts()) group->barrier();
  net_->replica()->rank().barrier();
}

UnmatchedNames Optimizer::load(const std::filesystem::path& file, bool strict) {
  UnmatchedNames unmatched;
  io::load_checked(file, [&](const io::NamedTensors& state, const std::map<std::string, std::string>& metadata) {
    if (!strict) {
      io::NamedTensors fitting = state;
      unmatched = take_out_unmatched(fitting, shapes_of(*net_));
      return load_state(without_frozen(fitting, *net_->replica(), name_));
    }
    const auto options = metadata.find(kOptionsKey);
    const std::string before = options_text(*inner_);
    if (options != metadata.end()) load_options(*inner_, options->second);  // a file of 0.1 has none
    try {
      load_state(without_frozen(state, *net_->replica(), name_));
    } catch (...) {
      load_options(*inner_, before);
      throw;
    }
    tell_of_new_ones(state, *net_->replica(), name_);
  });
  return unmatched;
}

std::vector<WatchedTensor> NetOptimizer::slices() const {
  if (!sharded_) return {};
  return watched_slices(*inner_, sharded_->buckets(), sharded_->divides_parameters());
}

// ---- Its groups.

std::vector<torch::optim::OptimizerParamGroup>& Optimizer::param_groups() {
  return inner_->param_groups();
}

void Optimizer::set_lr(double lr) {
  for (auto& group : param_groups()) group.options().set_lr(lr);
}

void Optimizer::set_weight_decay(torch::optim::OptimizerParamGroup& group, double weight_decay) {
  if (!(weight_decay >= 0)) {
    throw Error("the weight decay is " + number_text(weight_decay) + "; it must be at least 0");
  }
  using namespace torch::optim;
  const bool is_set =
      set_weight_decay_of<SGDOptions, AdamOptions, AdamWOptions, AdagradOptions, RMSpropOptions, LayerWise>(
          group.options(), weight_decay);
  if (!is_set) {
    throw Error(
        "set_weight_decay knows the options of SGD, Adam, AdamW, Adagrad, RMSprop, Lars and Lamb, and this "
        "group's are of another optimizer; set them yourself in group.options()");
  }
}

}  // namespace lockstep

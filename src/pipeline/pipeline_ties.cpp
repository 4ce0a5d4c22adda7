#include "pipeline_ties.hpp"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <lockstep/base/error.hpp>
#include <lockstep/models/tied_linear.hpp>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <map>
#include <string>

#include "pipeline_mail.hpp"
#include "ranks/gather.hpp"

namespace lockstep {
namespace {

using nlohmann::json;

// Ties layers to the stage's own parameters. Returns the layers that borrow from another stage, by the parameter's
// name.
std::map<std::string, std::vector<Tied*>> borrowing_layers(const PipelineStage& stage) {
  std::map<std::string, std::vector<Tied*>> layers;
  const auto parameters = stage.layers()->named_parameters();
  for (const auto& module : stage.layers()->modules()) {
    auto* const layer = dynamic_cast<Tied*>(module.get());
    if (layer == nullptr) continue;
    if (const at::Tensor* const own = parameters.find(layer->tied_to())) {
      layer->tie(*own);
    } else {
      layers[layer->tied_to()].push_back(layer);
    }
  }
  return layers;
}

// Joins the lists of all ranks, one after the other.
json joined_lists(const json& mine, Rank& rank) {
  json all = json::array();
  for (const auto& text : texts_of_all_ranks(mine.dump(), rank)) {
    for (const auto& entry : json::parse(text)) all.push_back(entry);
  }
  return all;
}

}  // namespace

PipelineTies::PipelineTies(std::vector<PipelineStage>& stages, Rank& rank) : rank_(rank) {
  std::map<int, std::map<std::string, std::vector<Tied*>>> layers;  // tied layers by stage
  json wanted = json::array();
  for (const auto& stage : stages) {
    layers[stage.index()] = borrowing_layers(stage);
    for (const auto& [name, tied] : layers[stage.index()]) wanted.push_back({{"name", name}, {"stage", stage.index()}});
  }
  if (!rank_.any(!wanted.empty())) return;
  wanted = joined_lists(wanted, rank_);
  // If several stages borrow one parameter, a single device adds the last stage's gradient first.
  std::sort(wanted.begin(), wanted.end(), [](const json& a, const json& b) { return a.at("stage") > b.at("stage"); });

  std::map<std::string, at::Tensor> parameters;  // this rank's parameters that are lent
  json offered = json::array();
  for (const auto& stage : stages) {
    for (const auto& item : stage.layers()->named_parameters()) {
      const auto is_it = [&](const json& tie) { return tie.at("name") == item.key(); };
      if (std::none_of(wanted.begin(), wanted.end(), is_it)) continue;
      parameters[item.key()] = item.value();
      offered.push_back({{"name", item.key()},
                         {"stage", stage.index()},
                         {"type", static_cast<int>(item.value().scalar_type())},
                         {"sizes", item.value().sizes().vec()}});
    }
  }
  offered = joined_lists(offered, rank_);
  for (const auto& tie : wanted) {
    const std::string name = tie.at("name");
    const int borrower = tie.at("stage");
    const auto found =
        std::find_if(offered.begin(), offered.end(), [&](const json& offer) { return offer.at("name") == name; });
    if (found == offered.end() || found->at("stage") >= borrower) {
      throw Error("Pipeline: a layer of stage " + std::to_string(borrower) + " is tied to " + name + ", which " +
                  (found == offered.end() ? "is no parameter of any stage"
                                          : "a later stage has, " + found->at("stage").dump()) +
                  "; tie it to a parameter of its own stage or of an earlier one");
    }
    ties_.push_back({.owner = found->at("stage"), .borrower = borrower});
    const auto own = parameters.find(name);
    parameters_.push_back(own == parameters.end() ? at::Tensor() : own->second);
    copies_.emplace_back();
    const auto here = layers.find(borrower);
    if (here == layers.end()) continue;
    const auto type = static_cast<at::ScalarType>(found->at("type").get<int>());
    copies_.back() =
        at::zeros(found->at("sizes").get<std::vector<int64_t>>(), at::TensorOptions(rank_.device()).dtype(type));
    copies_.back().requires_grad_();
    for (Tied* const layer : here->second.at(name)) layer->tie(copies_.back());
  }
  refresh();
}

void PipelineTies::refresh() {
  const c10::NoGradGuard no_grad;
  std::vector<c10::intrusive_ptr<c10d::Work>> open;
  for (size_t i = 0; i < ties_.size(); ++i) {
    const int owner = ties_[i].owner % rank_.world_size(), borrower = ties_[i].borrower % rank_.world_size();
    if (owner == borrower) {
      if (owner == rank_.index()) copies_[i].copy_(parameters_[i]);
      continue;
    }
    if (owner == rank_.index()) {
      std::vector<at::Tensor> values{parameters_[i].detach().contiguous()};
      open.push_back(rank_.backend().send(values, borrower, kTieTag));
    } else if (borrower == rank_.index()) {
      std::vector<at::Tensor> values{copies_[i].detach()};
      open.push_back(rank_.backend().recv(values, owner, kTieTag));
    }
  }
  for (const auto& work : open) work->wait();
}

at::Tensor PipelineTies::empty_gradient(int tie) const {
  return at::empty_like(parameters_[static_cast<size_t>(tie)], at::MemoryFormat::Contiguous).detach();
}

std::vector<std::pair<int, at::Tensor>> PipelineTies::take_gradients(int stage) {
  std::vector<std::pair<int, at::Tensor>> gradients;
  for (size_t i = 0; i < ties_.size(); ++i) {
    if (ties_[i].borrower != stage) continue;
    at::Tensor gradient = std::exchange(copies_[i].mutable_grad(), at::Tensor());
    if (!gradient.defined()) gradient = at::zeros_like(copies_[i]);
    gradients.emplace_back(static_cast<int>(i), gradient.detach().contiguous());
  }
  return gradients;
}

std::vector<PipelineStage::Root> PipelineTies::roots(const std::vector<std::pair<int, at::Tensor>>& gradients) const {
  std::vector<PipelineStage::Root> roots;
  for (const auto& [tie, gradient] : gradients) {
    const at::Tensor& parameter = parameters_[static_cast<size_t>(tie)];
    if (!parameter.requires_grad()) continue;
    const auto same = std::find_if(roots.begin(), roots.end(), [&, &parameter = parameter](const auto& root) {
      return root.tensor.is_same(parameter);
    });
    if (same == roots.end()) {
      roots.push_back({parameter, gradient});
    } else {
      same->gradient = same->gradient + gradient;
    }
  }
  return roots;
}

}  // namespace lockstep

// plan: finds the fastest layout on a cluster, by a model of costs. It knows neither ranks nor LibTorch.
//   cluster        devices and the links between them
//   model_profile  the costs of each layer of a net
//   plan           the best way to split a net, and its predicted cost
//
// How it works: the room profile measures a network's layers and the cluster's links. src/plan/cost_model.cpp and
// simulate.cpp predict a step from these. partition.cpp finds the best cuts (docs/plan.md).
#pragma once

#include <lockstep/plan/cluster.hpp>
#include <lockstep/plan/model_profile.hpp>
#include <lockstep/plan/plan.hpp>

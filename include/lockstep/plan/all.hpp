// plan: which layout is fastest on a cluster, by a model of costs. Knows neither ranks nor LibTorch.
//   cluster        devices and the links between them
//   model_profile  what each layer of a net costs
//   plan           which way to split a net is best, and what it will cost
//
// How it works. The room profile measures a network's layers and the cluster's links. src/plan/cost_model.cpp and
// simulate.cpp predict a step from these. partition.cpp finds the best cuts (docs/plan.md).
#pragma once

#include <lockstep/plan/cluster.hpp>
#include <lockstep/plan/model_profile.hpp>
#include <lockstep/plan/plan.hpp>

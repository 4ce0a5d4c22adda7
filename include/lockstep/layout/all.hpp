// layout: says how a network may lie over ranks. It has plain values alone.
//   model_split        the shape of a mesh of ranks, and how a network is split over it
//   pipeline_schedule  the order in which a rank computes its stages' forwards and backwards
#pragma once

#include <lockstep/layout/model_split.hpp>
#include <lockstep/layout/pipeline_schedule.hpp>

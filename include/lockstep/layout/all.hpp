// layout: how a network may lie over ranks. Plain values.
//   model_split        the shape of a mesh of ranks, and how a network is split over it
//   pipeline_schedule  in which order a rank computes its stages' forwards and backwards
#pragma once

#include <lockstep/layout/model_split.hpp>
#include <lockstep/layout/pipeline_schedule.hpp>

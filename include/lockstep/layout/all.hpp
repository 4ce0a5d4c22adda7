// layout: how a network may lie over ranks. Plain values.
//   mesh_shape         how many ranks stand along each axis of a mesh
//   model_split        how a network is split: by data, layers, channels, or several
//   pipeline_schedule  in which order a rank computes its stages' forwards and backwards
#pragma once

#include <lockstep/layout/mesh_shape.hpp>
#include <lockstep/layout/model_split.hpp>
#include <lockstep/layout/pipeline_schedule.hpp>

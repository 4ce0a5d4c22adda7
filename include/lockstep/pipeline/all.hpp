// pipeline: networks split by layers.
//   pipeline  Pipeline: a network split by its layers
#pragma once

#include <lockstep/pipeline/pipeline.hpp>

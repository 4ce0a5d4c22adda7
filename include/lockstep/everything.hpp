// This header has everything: the core, all wings, the trainer, and the headers of the core that lockstep.hpp leaves
// out. The component data alone is left out (data/fetch_data.hpp).
#pragma once

#include <lockstep/book.hpp>
#include <lockstep/data_parallel/sync_batch_norm.hpp>
#include <lockstep/devices/device_info.hpp>
#include <lockstep/fit.hpp>
#include <lockstep/lab.hpp>
#include <lockstep/lockstep.hpp>
#include <lockstep/models.hpp>
#include <lockstep/nn/layer_holder.hpp>
#include <lockstep/nn/tensor_files.hpp>
#include <lockstep/optim/layer_wise.hpp>
#include <lockstep/ranks/functional.hpp>
#include <lockstep/split.hpp>
#include <lockstep/survive.hpp>

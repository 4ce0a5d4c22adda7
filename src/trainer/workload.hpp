// Workload: what a run trains, and what it says of its data; and run_workload(), which train() and fit() are.
#pragma once

#include <lockstep/trainer/task.hpp>
#include <lockstep/trainer/trainer.hpp>

#include "data/data_digests.hpp"

#include <functional>
#include <string>

namespace lockstep {

struct Workload {
  Task task;
  DataDigests digests = {};
  std::string announcement = {};  // text about the data, for TrainCallbacks::on_data
  std::string warning = {};       // warning about the data; empty: there is none
  std::string title = {};         // title of the curve: the network and the data
};

// Trains as train() says. `settings` are checked. `load` is called once the run folder is free; what it throws ends the
// run before its first step.
TrainResult run_workload(const TrainOptions& settings, const TrainCallbacks& callbacks,
                         const std::function<Workload()>& load);

Task task_of(const TrainOptions& options, const ImageData& data);

Workload workload_of_images(const TrainOptions& options, const ImageData& data, const DataDigests& digests);

// The workload of train() with these options; loads the data.
Workload workload_of(const TrainOptions& options);

}  // namespace lockstep

// A Workload has the task that a run trains, and texts about the data. train() and fit() call run_workload().
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
  std::string title = {};         // title of the run: the network and the data
};

// Trains as train() says. Give checked `settings`. It calls `load` once the run folder is free; an exception of `load`
// ends the run before its first step.
TrainResult run_workload(const TrainOptions& settings, const TrainCallbacks& callbacks,
                         const std::function<Workload()>& load);

Task task_of(const TrainOptions& options, const ImageData& data);

Workload workload_of_images(const TrainOptions& options, const ImageData& data, const DataDigests& digests);

// Gives the workload of train() with these options; loads the data.
Workload workload_of(const TrainOptions& options);

}  // namespace lockstep

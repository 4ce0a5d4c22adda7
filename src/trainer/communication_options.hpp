// What a run's options say of the exchange between its ranks.
#pragma once

#include <lockstep/data_parallel/communication_hook.hpp>
#include <lockstep/data_parallel/local_sgd.hpp>
#include <lockstep/trainer/trainer.hpp>

#include <memory>
#include <string>

namespace lockstep {

// Throws Error as train() does; `options` are right otherwise.
void check_communication(const TrainOptions& options);

// For one rank; null: gradients are averaged as they are.
std::shared_ptr<CommunicationHook> make_communication_hook(const TrainOptions& options);

LocalSgdOptions local_sgd_options(const TrainOptions& options);

// "gradients in bf16", "parameters every 16 steps, outer lr 0.7, outer momentum 0.9"; empty: gradients as they are.
std::string communication_text(const TrainOptions& options);

}  // namespace lockstep

// The options of the exchange between a run's ranks.
#pragma once

#include <lockstep/data_parallel/communication_hook.hpp>
#include <lockstep/lab/local_sgd.hpp>
#include <lockstep/trainer/trainer.hpp>

#include <cstdint>
#include <memory>
#include <string>

namespace lockstep {

// Throws Error as train() does; `options` are right otherwise.
void check_exchange(const TrainOptions& options);

// The hook for one rank. Null: gradients are averaged as they are.
std::shared_ptr<CommunicationHook> make_communication_hook(const ExchangeOptions& exchange, uint64_t seed);

LocalSgdOptions local_sgd_options(const ExchangeOptions& exchange);

// "gradients in bf16", "parameters every 16 steps, outer lr 0.7, outer momentum 0.9"; empty: gradients as they are.
std::string exchange_text(const ExchangeOptions& exchange);

}  // namespace lockstep

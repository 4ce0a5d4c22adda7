// Checks of what a Pipeline refuses, nearly all of it before it computes anything.
#pragma once

#include <lockstep/pipeline/pipeline.hpp>

#include <cstdint>
#include <string>
#include <vector>

namespace lockstep {

// Checks what this rank can see by itself. Throws Error for a number of stages that does not go with the ranks and the
// schedule, microbatches < 1, a stage of this rank without layers, or random layers that would be computed twice.
void check_stages(const std::vector<torch::nn::Sequential>& stages, const Rank& rank, const PipelineOptions& options);

// Call these on all ranks. They throw Error on every rank if two ranks differ. `first_here` is the first of this
// rank's stages that has parameters, and `stages` if none has. compare_options gives the same for the stages of all
// ranks.
int compare_options(Rank& rank, int stages, const PipelineOptions& options, int first_here);
void compare_batches(Rank& rank, const std::string& shape, int64_t size);

// Throws Error on every rank if the ranks' samples differ. Not every input is compared: see rank_with_another_input.
void compare_inputs(Rank& rank, const at::Tensor& x, int64_t inputs);

// Throws Error if this rank's Batch::mark is not the last rank's; 0: the mark is not known.
void check_mark(const Rank& rank, int32_t mark, int32_t of_last);

}  // namespace lockstep

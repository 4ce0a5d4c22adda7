// ArithmeticCheck: has a fraction of the grains computed again by another rank, and compares the results to the bit.
//
// If bits differ, all ranks compute that grain again, and the majority decides. Which grains are checked follows from
// the seed and the step, so that all ranks know without a message. Nothing that training uses is changed.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <lockstep/data/data.hpp>
#include <lockstep/nn/sample_scope.hpp>
#include <lockstep/ranks/rank.hpp>

#include "data_parallel/grain_check.hpp"
#include "ranks/trained_parameters.hpp"

#include <atomic>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace lockstep {

// Names a grain, the rank that computes the grain for the step, and the rank that does so again.
struct CheckedGrain {
  int64_t number = 0;
  int owner = 0;
  int checker = 0;
  friend bool operator==(const CheckedGrain&, const CheckedGrain&) = default;
};

// Gives the grains of a step that are checked: on average `fraction` of each rank's. All ranks have theirs in the same
// steps, and so compute them at the same time. runs[r] up to runs[r + 1] are rank r's. With one rank there are none.
std::vector<CheckedGrain> drawn_grains(double fraction, uint64_t seed, int64_t step, const std::vector<int64_t>& runs);

// Holds a rank's result for one grain: one hash for its loss and one for each parameter's gradient.
using GrainHashes = std::vector<int64_t>;

// Gives the ranks that computed the grain wrongly. The right result is that of more than half of all ranks when all
// compute the grain `again`. A rank is wrong if any of its results is another one. Gives none without such a majority.
std::vector<int> wrong_ranks(const CheckedGrain& grain, const GrainHashes& owners, const GrainHashes& checkers,
                             const std::vector<GrainHashes>& again);

class ArithmeticCheck final : public GrainCheck {
 public:
  explicit ArithmeticCheck(double fraction);

  void watch(const torch::nn::Module& module, const Rank& rank) override;
  // Keeps the samples of the part's grains that are checked.
  void begin(const Batch& part, const SampleScope::Place& place, const MeanOf& mean_of) override;
  void note(int64_t grain, const at::Tensor& parameter, const at::Tensor& value) override;
  // Throws Error on all ranks: a grain that two ranks computed with different bits. Cost, in steps with checked grains:
  // their samples go to all ranks; a forward and a backward of each at its checker.
  void compare() override;

 private:
  struct Note {  // a checked grain that this rank computes for the step
    Batch grain;
    GrainHashes hashes;
  };
  using Notes = std::map<int64_t, Note>;

  std::vector<Batch> samples_of_all(const Notes& notes);
  at::Tensor sent(const at::Tensor& mine, int64_t rows, const int64_t* strides, int owner);
  GrainHashes compute(const Batch& grain, const MeanOf& mean_of);
  [[noreturn]] void decide(const CheckedGrain& checked, const Batch& grain, const GrainHashes& owners,
                           const GrainHashes& checkers, const MeanOf& mean_of);
  std::string difference(const GrainHashes& one, const GrainHashes& other) const;

  const double fraction_;
  std::atomic<bool> taken_ = false;  // watch() has taken it
  const torch::nn::Module* module_ = nullptr;
  std::optional<Rank> rank_;
  NamedParameters parameters_;
  std::map<const c10::TensorImpl*, size_t> places_;  // places in GrainHashes
  // These belong to the step's batch:
  std::vector<CheckedGrain> drawn_;
  Batch part_;  // this rank's part of the batch, or a part of that
  SampleScope::Place place_;
  MeanOf mean_of_;
  bool autocast_ = false;  // autocast is on around mean_of
  c10::ScalarType autocast_type_ = c10::ScalarType::BFloat16;
  Notes notes_;
};

}  // namespace lockstep

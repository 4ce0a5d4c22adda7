// Loss::Part: the loss of this rank's part of a batch, as terms of a sum, and the one loop in which their gradients are
// computed. The part is one term; by grains each of its grains is one, and stand-ins follow.
//
// Use it from the rank's thread only.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>
#include <lockstep/data/data.hpp>
#include <lockstep/data_parallel/loss.hpp>
#include <lockstep/nn/sample_scope.hpp>

#include "grain_check.hpp"
#include "part_sizes.hpp"

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

namespace lockstep {

using MeanOf = GrainCheck::MeanOf;

// These make the loss of a batch's part: mean_of() of its samples, called as DataParallel::loss() says. loss_of() calls
// it at once and keeps the graphs for backward(). With late_loss_of() each term's forward comes in backward(), just
// before that term's backward, so that one graph is in memory at a time. value() is known afterwards.
Loss loss_of(const std::shared_ptr<Replica>& replica, const Batch& batch, const MeanOf& mean_of);
Loss late_loss_of(const std::shared_ptr<Replica>& replica, const Batch& batch, const MeanOf& mean_of);
// Does the same where terms interleave, as in a pipeline: backward() calls compute(). Do forward and backward of
// all terms in it, average the gradients, and return the part's mean loss.
Loss interleaved_loss_of(const std::shared_ptr<Replica>& replica, const Batch& batch,
                         std::function<at::Tensor()> compute);

class Loss::Part {
 public:
  // Nothing is computed yet. A part with a grain must keep its batch. Otherwise the batch must outlive forward().
  Part(std::shared_ptr<Replica> replica, const Batch& batch, MeanOf mean_of, bool keeps_batch);
  Part(std::shared_ptr<Replica> replica, const Batch& batch, std::function<at::Tensor()> compute);  // is interleaved
  // `mean` was computed by the caller; undefined if there are no samples.
  Part(std::shared_ptr<Replica> replica, at::Tensor mean, double local_size, double global_size);

  void forward();   // computes the means of all terms
  void backward();  // computes the gradients of all terms, and before each the mean that is not there yet
  at::Tensor value() const;
  double global_value() const;

  // Makes backward() multiply the gradients by factor / scale_divisor(), in 32 bits or more. Throws Error for terms
  // that interleave, and beside a GrainCheck.
  void scale(double factor);
  static double scale_divisor(const Replica& replica, bool by_grains);

 private:
  struct Term {
    int64_t number = 0;     // the grain's number, or kStandIn
    int64_t size = 0;       // the number of samples
    at::Tensor mean = {};   // the mean loss, with its graph
    at::Tensor value = {};  // by grains, the mean's value, without a graph
  };
  static bool is_stand_in(const Term& term) { return term.number == kStandIn; }
  at::Tensor mean_of(const Term& term) const;
  void compute(Term& term);
  void begin(const MeanOf& mean_of);
  void check(const Term& term) const;
  void backward_of(const Term& term, int64_t stand_ins) const;
  void backward_of_all();
  void backward_interleaved();
  void check_that_it_is_computed() const;

  const std::shared_ptr<Replica> replica_;
  const PartSizes sizes_;
  const double size_ = static_cast<double>(sizes_.local);  // the part's samples, or what its mean is over
  double weight_ = 1;                                      // the part's weight in the average of the ranks' parts
  double scale_ = 1;                                       // the factor of all gradients, for a LossScaler
  std::optional<Batch> kept_batch_ = {};
  const Batch* batch_ = nullptr;  // the batch until the means are there
  MeanOf mean_of_;                // empty: the means are there
  SampleScope::Place place_;
  std::vector<int64_t> runs_ = {};  // Batch::runs; empty: not by grains
  c10::SmallVector<Term, 1> terms_ = {};
  const bool is_interleaved_ = false;
  bool is_done_ = false;                      // backward() cannot be called again
  std::function<at::Tensor()> compute_ = {};  // for interleaved terms: the function that backward() calls, once
  at::Tensor sum_ = {};  // by grains, the sum of the samples' losses; else the part's mean, with its graph
};

}  // namespace lockstep

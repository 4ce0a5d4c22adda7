// GrainSums: one rank's sums of a bucket's gradients over its grains, in the tree of grain_tree.hpp.
//
// The sums of blocks lie in rows of memory, which come when they are needed. A gradient that completes blocks, as the
// right half, is added to all of them at once, in one pass over memory. A left half is kept as it is, unless the right
// half is another rank's. A parameter that a grain does not use counts as -0 there, and changes no bit of a sum. Use it
// from one thread at a time. Cost: as many additions as one gradient that all grains add to.
#pragma once

#include <ATen/core/Tensor.h>

#include "data/parts.hpp"
#include "grain_tree.hpp"
#include "nn/factors_scope.hpp"

#include <cstdint>
#include <functional>
#include <vector>

namespace lockstep {

class GrainSums {
 public:
  // Gives a parameter's part of a row, with the parameter's shape.
  using View = std::function<at::Tensor(size_t parameter, const at::Tensor& row)>;
  GrainSums(size_t parameters, int64_t columns, const at::TensorOptions& options, View view);

  // Forgets what was added. The grains to come are those of `run`. `first`, of as many columns, becomes the first row;
  // undefined: memory of its own does, and stays for the next run.
  void begin(const Range& run, const at::Tensor& first = {});

  struct Sum {                                  // the sum of a block's gradients
    at::Tensor value = {};                      // its row, or a gradient
    std::vector<GradientFactors> factors = {};  // all its grains' factors; without both, no grain had a gradient
  };
  // Adds a parameter's gradient of a grain, which may be kept, or its factors. A parameter's grains ascend; it may
  // leave some out. Gives false for one out of order. Give factors only for a contiguous parameter, if takes() is true.
  // Factors are kept, and summed together with those of other grains of the block, as long as they take no more memory
  // than the gradient.
  bool add(size_t parameter, int64_t grain, Sum gradient);
  static bool takes(const GradientFactors& factors);

  bool any(size_t parameter) const;  // tells whether it had a gradient of some grain

  // Call it after the run's last grain. Brings all sums to their rows, on the stream on which the gradients are.
  void finish();

  // Gives the sums of blocks_of(run), valid until the next begin(). Call finish() first.
  std::vector<at::Tensor> rows() const;

  const at::Tensor& first_row() { return row(0); }  // exists also where the run is empty

  // Gives all memory of its own back, until the next begin(). Do not read the rows any more.
  void release();

 private:
  struct Column {                         // the sums of one parameter
    int64_t next = 0;                     // the next grain
    std::vector<GrainBlock> blocks = {};  // a row each
    std::vector<Sum> sums = {};           // the sums of the blocks
    std::vector<at::Tensor> rows = {};    // this parameter's views of all rows
    bool any = false;
  };
  void push(Column& column, Sum sum);
  static bool join_factors(Column& column, size_t into);
  void sum_factors(Column& column, size_t number, bool to_row);
  void take_to_row(Column& column, size_t number);  // takes a defined value there
  void add_up(Column& column, size_t into);         // adds the sums from number `into` on into that one
  bool stays(const GrainBlock& block) const;        // tells whether this run leaves the block as it is
  const at::Tensor& row(size_t number);
  void set_row(size_t number, const at::Tensor& memory);

  const int64_t columns_;
  const at::TensorOptions options_;
  const View view_;
  Range run_;
  std::vector<at::Tensor> rows_;  // the rows that the parameters share; undefined: not needed yet
  at::Tensor own_first_;
  std::vector<Column> parameters_;
};

}  // namespace lockstep

// Task: the network, the loss and the data of your own that fit() trains, and the measures of them.
//
// It is a plain value. Copies share the data and the functions. Make the functions thread-safe, since all ranks of a
// process call them at the same time. Only a maker of the module that takes no seed is called in turn.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>
#include <lockstep/data/sample_function.hpp>
#include <lockstep/data/samples.hpp>
#include <lockstep/data_parallel/data_parallel.hpp>
#include <lockstep/data_parallel/optimizer.hpp>
#include <lockstep/split/split_model.hpp>
#include <lockstep/trainer/module_maker.hpp>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace lockstep {

// Measures a value on the test samples after each epoch, beside the loss.
struct Metric {
  std::string name;  // a name that is not "loss" and not "accuracy"
  // A function (y_hat, y), or (y_hat, batch), of some samples -> a value for each of them [n], or the values' mean, one
  // number. The metric is the mean over all test samples. Or a MeanOver, also one of a row of sums and a row of counts:
  // see evaluate() of criteria.
  Criterion of = detail::SampleFunction();
  bool more_is_better = false;
};

// Task::before_step gets this: where the run is, between two steps, and what it trains.
struct NextStep {
  int epoch;             // the epoch's number, from 1
  int64_t done;          // steps of this epoch that are done, from 0
  int64_t steps;         // steps of a whole epoch
  Rank& rank;            // this rank of the run
  SplitModel& net;       // for net.forward() between net.eval() and net.train(), as in evaluate()
  Optimizer& optimizer;  // its learning rate is what the options give the next step
  // Gives the mean loss of this rank's samples of the epoch so far. On a GPU it waits for the steps.
  std::function<double()> loss;
  // Gives the whole network, to read or to save it until before_step returns. Call it on all ranks.
  std::function<std::shared_ptr<torch::nn::Module>()> whole;
};

struct Task {
  std::string name = "my-net";  // name in the run's config.json, in titles and errors; none of model_names()
  ModuleMaker module;
  Criterion criterion;  // (y_hat, y), or (y_hat, batch), of some samples -> their mean loss, one number; or a MeanOver
  Samples train;
  Samples test = {};        // samples of the measures after each epoch; none: nothing is measured
  std::string source = {};  // source of the data, in words, for reports and errors
  // The network tells classes apart: y_hat is [n, classes], and y is int64 [n]. Then right answers are counted, for
  // EpochMetrics::train_accuracy and test_accuracy, which are NaN otherwise.
  bool accuracy = false;
  std::vector<Metric> metrics = {};
  // The measure by which epochs are compared: "loss", "accuracy" or one of the metrics. The best epoch's checkpoint
  // stays. Empty: "accuracy" where that is counted, or else "loss".
  std::string best_by = {};
  int patience = 0;  // the run ends when so many epochs in a row were no better than the best; 0: it never ends so
  // The loss is a cross-entropy in nats, as of a language model. Then EpochMetrics::test also has "perplexity", its
  // exponential.
  bool perplexity = false;
  using Groups = std::vector<torch::optim::OptimizerParamGroup>;
  // Makes the optimizer of these groups of parameters, in the place of the one that the options name. The options'
  // learning rate, schedule and clipping count for it too, and for all groups alike. With zero_stage the groups hold
  // the rank's slices: see Optimizer::Make. Empty: the options' optimizer.
  std::function<std::unique_ptr<torch::optim::Optimizer>(Groups groups)> optimizer = {};
  // Divides the network's parameters into the groups that `optimizer` gets, such as lockstep::decay_groups. With a
  // split by layers or channels it is given the rank's layers. Give a thread-safe function, since ranks may call it at
  // the same time. Empty: all parameters are one group.
  std::function<Groups(const torch::nn::Module& net)> groups = {};
  // Decay of an exponential moving average of the weights, from 0 to below 1, such as 0.999. After every step the
  // average becomes ema_decay * average + (1 - ema_decay) * weights; after the first step it is the weights, as in
  // PyTorch's AveragedModel. The average is then evaluated and kept after an epoch, with the buffers of the network. 0:
  // the weights are evaluated and kept.
  double ema_decay = 0;
  // A function that is called on all ranks before each step, to log, to evaluate, to save, or to end the run by
  // TrainCallbacks::stop. A learning rate that it sets, such as next.optimizer.set_lr(0.1), counts for the next step
  // alone. Set the same on all ranks, and do the same there: next.done and next.epoch are equal, next.loss() is not. An
  // exception ends the run. The epoch's seconds include it. A recorded step (cuda_graph) sees the learning rates, but
  // no parameter that is frozen meanwhile. Empty: it costs nothing.
  std::function<void(const NextStep& next)> before_step = {};
};

}  // namespace lockstep

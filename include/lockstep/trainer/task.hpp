// Task: what fit() trains: a network, a loss and data of your own, and what is measured of them.
//
// A plain value. Copies share the data and the functions. All ranks of a process call the functions at the same time,
// but for a maker of the module that takes no seed: that they call in turn.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>
#include <lockstep/data/sample_function.hpp>
#include <lockstep/data/samples.hpp>
#include <lockstep/data_parallel/data_parallel.hpp>
#include <lockstep/trainer/module_maker.hpp>

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace lockstep {

// A value that is measured on the test samples after each epoch, beside the loss.
struct Metric {
  std::string name;  // not "loss" and not "accuracy"
  // (y_hat, y), or (y_hat, batch), of some samples -> a value for each of them [n], or their mean, one number. The
  // metric is the mean over all test samples.
  detail::SampleFunction of;
  bool more_is_better = false;
};

struct Task {
  std::string name = "my-net";  // in the run's config.json, in titles and errors; none of model_names()
  ModuleMaker module;
  Criterion criterion;  // (y_hat, y), or (y_hat, batch), of some samples -> their mean loss, one number
  Samples train;
  Samples test = {};        // samples of the measures after each epoch; none: nothing is measured
  std::string source = {};  // where the data come from, in words, for reports and errors
  // The network tells classes apart: y_hat is [n, classes], and y is int64 [n]. Then right answers are counted, for
  // EpochMetrics::train_accuracy and test_accuracy, which are NaN otherwise.
  bool accuracy = false;
  std::vector<Metric> metrics = {};
  // "loss", "accuracy" or one of the metrics: by which epochs are compared. The best one's checkpoint stays. Empty:
  // "accuracy" where that is counted, or else "loss".
  std::string best_by = {};
  int patience = 0;  // the run ends when so many epochs in a row were no better than the best; 0: never so
  // The loss is a cross-entropy in nats, as of a language model. Then EpochMetrics::test also has "perplexity", its
  // exponential.
  bool perplexity = false;
  using Groups = std::vector<torch::optim::OptimizerParamGroup>;
  // Makes the optimizer of these groups of parameters, in the place of the one that the options name. The options'
  // learning rate, schedule and clipping count for it too, and for all groups alike. With zero_stage the groups hold
  // the rank's slices: see Optimizer::Make. Empty: the options' optimizer.
  std::function<std::unique_ptr<torch::optim::Optimizer>(Groups groups)> optimizer = {};
  // Divides the network's parameters into the groups that `optimizer` gets, such as lockstep::decay_groups. With a
  // split by layers or channels it is given the rank's layers. Each rank's thread calls it, maybe at the same time.
  // Empty: all parameters are one group.
  std::function<Groups(const torch::nn::Module& net)> groups = {};
  // Decay of an exponential moving average of the weights, from 0 to below 1, such as 0.999. After every step the
  // average becomes ema_decay * average + (1 - ema_decay) * weights; after the first step it is the weights, as
  // PyTorch's AveragedModel has it. The average is then evaluated and kept after an epoch, with the buffers of the
  // network. 0: the weights are.
  double ema_decay = 0;
};

}  // namespace lockstep

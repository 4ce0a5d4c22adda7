// Computes the measures of a run's network, and compares a run's epochs by one of them.
#pragma once

#include <lockstep/trainer/metrics.hpp>
#include <lockstep/trainer/task.hpp>

#include "data_parallel/measure.hpp"

#include <string>
#include <vector>

namespace lockstep {

// Tells which answers of y_hat [n, classes] are right, bool [n]. Throws Error if y is not a class for each sample.
at::Tensor right_answers(const at::Tensor& y_hat, const at::Tensor& y);

// Gives the criterion's mean loss of some samples. Throws Error, which names the rank, if it is not one number.
at::Tensor checked_loss(const Task& task, const Rank& rank, const at::Tensor& y_hat, const Batch& batch);

// measures_of() lists what is measured on the task's test samples. put_measures() makes the metrics of these means.
std::vector<Measure> measures_of(const Task& task);
void put_measures(const std::vector<double>& means, const Task& task, EpochMetrics& metrics);

// Says by which measure epochs are compared.
struct Judge {
  std::string measure = "accuracy";
  bool more_is_better = true;
};
Judge judge_of(const Task& task);

// Gives the settings of a task that all processes of a launcher must have alike, as a text; "" for a task of train().
std::string measures_text(const Task& task);

// Gives the number of the first of the best epochs; 0 if there is none, or no value of the measure.
int best_epoch(const std::vector<EpochMetrics>& history, const Judge& judge);

// Tells the user what follows if the last epoch is the first one whose measure has no value. Else gives "".
std::string remark_on_no_value(const std::vector<EpochMetrics>& history, const Judge& judge, int patience);

// Tells whether the last `patience` epochs were no better than one before them.
bool is_enough(const std::vector<EpochMetrics>& history, const Judge& judge, int patience);

}  // namespace lockstep

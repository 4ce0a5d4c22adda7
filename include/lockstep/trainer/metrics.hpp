// Metrics: the values that an epoch measured, and the files that keep them.
//
// Files are replaced whole (written beside, then renamed), so a reader, a crash or a full disk never meets half a file.
// Use a file from one thread at a time.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

namespace lockstep {

// Says what held up a rank in an epoch, and what memory it took.
struct RankMetrics {
  double data_wait = 0;  // seconds in which the rank waited for data
  double rank_wait = 0;  // seconds in which the rank waited for others; NaN: not measured, as in recorded steps
  int64_t memory = 0;    // peak memory so far in bytes, of a GPU or of a CPU rank's process; 0: unknown
};

struct EpochMetrics {
  int epoch = 0;              // the epoch's number, from 1
  double train_loss = 0;      // mean loss over the epoch's samples, each as computed in its minibatch
  double train_accuracy = 0;  // accuracy in [0, 1], likewise; NaN: not counted
  double test_accuracy = 0;   // accuracy in [0, 1], after the epoch, every test sample counted once; NaN: not counted
  double seconds = 0;         // seconds of training, devices synchronised, evaluation not counted
  double data_wait = 0;       // share of these seconds, in [0, 1], in which a rank waited for data: the rank that
                              // waited longest; 0: not measured
  double lr = 0;              // learning rate of the epoch's last step; 0: not kept
  // Bytes per step of the rank that sends most, averaged over the epoch's steps. An allreduce of n bytes among k ranks
  // counts as 2 (k - 1) / k n, as a ring sends it. 0: not counted.
  double bytes_per_step = 0;
  // Parts of a full batch, in samples on each device, at the epoch's end. Empty: near-equal parts.
  std::vector<int64_t> parts = {};
  std::string weights = {};  // weights_hash of the network after the epoch (tensor_files.hpp); empty: not kept
  // Means over the test samples after the epoch, by name: "loss", the metrics of a Task (task.hpp), and of a text
  // "perplexity".
  std::map<std::string, double> test = {};
  std::vector<RankMetrics> ranks = {};  // metrics by rank; empty: not kept. Files keep four digits of their seconds
};

// Writes one JSON object per line and epoch. A loss that is not finite is written as null, and read back as NaN. With
// `synthetic` every line says that the data were synthetic; read_metrics ignores this. If it throws Error, the earlier
// file does not change.
void write_metrics(const std::filesystem::path& file, const std::vector<EpochMetrics>& history, bool synthetic = false);

// Reads a file of write_metrics. Throws Error that names the file and the line.
std::vector<EpochMetrics> read_metrics(const std::filesystem::path& file);

}  // namespace lockstep

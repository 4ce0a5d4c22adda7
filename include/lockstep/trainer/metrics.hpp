// Metrics: what an epoch measured, and the files that keep it.
//
// Files are replaced whole (written beside, then renamed), so a reader, a crash or a full disk never meets half a file.
// Not thread-safe for the same file.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace lockstep {

struct EpochMetrics {
  int epoch = 0;              // from 1
  double train_loss = 0;      // mean over the epoch's samples, each as its minibatch saw it
  double train_accuracy = 0;  // in [0, 1], likewise
  double test_accuracy = 0;   // in [0, 1], after the epoch, every test sample counted once
  double seconds = 0;         // of the epoch's training, devices synchronised, evaluation not counted
  double data_wait = 0;       // share of these seconds, in [0, 1], in which a rank had no minibatch yet (the rank that
                              // lacked one longest); 0 where nobody measured it
  double lr = 0;              // learning rate of the epoch's last step; 0 where nobody kept it
  // That the rank which sends most sends to the others per step, the mean over the epoch's steps; an allreduce of n
  // bytes among k ranks counts as 2 (k - 1) / k n, as a ring sends it. 0 where nobody counted.
  double bytes_per_step = 0;
  std::vector<int64_t> parts =
      {};  // samples of a full batch on each device, at the epoch's end; empty: near-equal ones
};

// Writes one JSON object per line and epoch; a loss that is not finite as null, which is read back as NaN. With
// `synthetic` every line says that the data were (read_metrics does not mind). Throws Error; the file of before stays
// as it was.
void write_metrics(const std::filesystem::path& file, const std::vector<EpochMetrics>& history, bool synthetic = false);

// Reads what write_metrics wrote. Throws Error that names the file and the line.
std::vector<EpochMetrics> read_metrics(const std::filesystem::path& file);

// Draws train loss, train accuracy and test accuracy over the epochs with gnuplot (the section's animated plot): an SVG
// or a PNG, by the file's extension. Values that are not finite leave a gap. Takes some tens of milliseconds. Throws
// Error if there is no epoch, or gnuplot is missing (the text says which package has it), fails or hangs (it gets 10
// s); the file of before stays as it was.
void draw_curve(const std::filesystem::path& file, const std::vector<EpochMetrics>& history, const std::string& title);

}  // namespace lockstep

// report makes one HTML file of runs, to look at in a browser: curves, times and waits of ranks, the split, a traced
// step, the settings and where they differ. The file needs no network and no other file.
//
// train() and fit() write the report of their run, report.html; `lockstep report` makes one of several. Use different
// files from different threads. Cost: the runs' metrics.jsonl are read, and the file has them with 40 kB around.
#pragma once

#include <filesystem>
#include <vector>

namespace lockstep {

// Replaces `file` by the report of the runs in these folders, which train() keeps, also of runs that still train. A
// folder of runs stands for all of them. Names and texts of a run are shown as text, whatever is in them. Throws Error,
// which names the file, if there is no run, if a run's metrics cannot be read, or if `file` cannot be written.
void write_report(const std::filesystem::path& file, const std::vector<std::filesystem::path>& run_dirs);

}  // namespace lockstep

// RunNotes has what only the running program knows of a run, and its report shows: notes.json.
//
//   title, lockstep      the network, the data and the devices; lockstep's version
//   ranks, split         the ranks' names; how the network is split over them, as config.json has a split
//   samples              a full batch's samples on each rank of the data axis
//   tensors              what each rank holds: "name size size\n" for each parameter; one text: all hold the whole net
//   timeline             a traced step: Trace::step()
//   warnings, straggler  texts that the user was told
//   end                  why the run ended early; "": it did not
//   best                 the measure by which the best epoch is chosen, and whether more of it is better
// Thread-safe.
#pragma once

#include <lockstep/layout/model_split.hpp>
#include <nlohmann/json.hpp>

#include <cstdint>
#include <filesystem>
#include <mutex>
#include <string>
#include <vector>

namespace lockstep {

// Says what each rank has of the network and of a batch.
struct RankLayout {
  std::vector<std::string> names;
  ModelSplit split;
  std::vector<int64_t> samples;
  std::vector<std::string> tensors;
};

class RunNotes {
 public:
  void set(const char* key, nlohmann::ordered_json value);
  void set(const RankLayout& layout);
  void warn(const std::string& text);

  // Takes over the notes of the run that goes on. Those of a file that cannot be read are lost.
  void take(const std::filesystem::path& file);

  std::string text() const;

 private:
  void add_warning(const nlohmann::ordered_json& text);

  mutable std::mutex mutex_;
  nlohmann::ordered_json notes_ = nlohmann::ordered_json::object();
};

}  // namespace lockstep

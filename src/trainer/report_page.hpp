// Makes the HTML page of a report. report/ has the page's own files, which CMake puts into the library.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include <filesystem>
#include <string>
#include <vector>

namespace lockstep {

extern const char* const kEmptyReport;  // the page, with {{data}} in the place of a report's data

// Does what write_report() does, with more charts at the top. A chart has {"title", "x", "y", "log_x", "log_y",
// "lines"}, and a line {"name", "points": [[x, y], …]}. Without runs the page has the charts alone, under `title`.
void write_report_page(const std::filesystem::path& file, const std::vector<std::filesystem::path>& run_dirs,
                       const nlohmann::ordered_json& charts, const std::string& title = "");

}  // namespace lockstep

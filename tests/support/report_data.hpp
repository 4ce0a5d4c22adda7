// Reads the data in a report's page.
#pragma once

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

namespace lockstep {

class ReportData {
 public:
  explicit ReportData(const std::filesystem::path& file) {
    std::ifstream in(file);
    page_.assign(std::istreambuf_iterator<char>(in), {});
    const std::string begin = "<script id=\"data\" type=\"application/json\">";
    const size_t at = page_.find(begin) + begin.size();
    data_ = nlohmann::json::parse(page_.substr(at, page_.find("</script>", at) - at), nullptr, false);
    EXPECT_TRUE(data_.is_object()) << file;
  }

  const std::string& page() const { return page_; }
  const nlohmann::json& all() const { return data_; }
  const nlohmann::json& run(size_t index = 0) const { return data_["runs"][index]; }

 private:
  std::string page_;
  nlohmann::json data_;
};

}  // namespace lockstep

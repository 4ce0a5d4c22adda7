#include <lockstep/trainer/data_options.hpp>

#include "base/names.hpp"

#include <array>
#include <utility>

namespace lockstep {
namespace {

constexpr std::array data_sources{std::pair{DataSource::fashion_mnist, "fashion-mnist"},
                                  std::pair{DataSource::synthetic, "synthetic"}};

}  // namespace

std::string_view to_string(DataSource source) {
  return name_in(data_sources, source);
}

DataSource data_source_from(std::string_view name) {
  return value_in(data_sources, name, "the data set");
}

ImageData load_data(const DataOptions& options) {
  return options.source == DataSource::synthetic ? synthetic_images() : load_fashion_mnist(options.folder);
}

}  // namespace lockstep

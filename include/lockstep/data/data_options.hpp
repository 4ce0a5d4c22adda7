// DataOptions: names the data that a run trains on, and where they lie.
#pragma once

#include <lockstep/data/data.hpp>

#include <filesystem>
#include <string_view>

namespace lockstep {

enum class DataSource { fashion_mnist, synthetic };

// Names a source: "fashion-mnist", "synthetic". data_source_from() converts back, or throws Error that lists them.
std::string_view to_string(DataSource source);
DataSource data_source_from(std::string_view name);

struct DataOptions {
  DataSource source = DataSource::fashion_mnist;
  std::filesystem::path folder = {};  // the folder of Fashion-MNIST's IDX files; empty: where packages put them
  std::filesystem::path text = {};    // the file of a model that learns text (models.hpp), in the place of images
};

// Loads the images. Throws Error as load_fashion_mnist does.
ImageData load_data(const DataOptions& options);

}  // namespace lockstep

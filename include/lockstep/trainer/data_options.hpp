// DataOptions: names the data that a run trains on, and where they lie.
#pragma once

#include <lockstep/data/data.hpp>

#include <cstdint>
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

// Makes a stand-in of the same shapes and types, which a network can learn. Its images are ten random patterns, moved,
// faded, and mixed with each other and with noise. `source` says "synthetic". The same seed gives the same bits on
// every machine. Throws Error for a size below 1.
ImageData synthetic_images(int64_t train_size = 60000, int64_t test_size = 10000, uint64_t seed = 0);

// Loads the images. Throws Error as load_fashion_mnist does.
ImageData load_data(const DataOptions& options);

}  // namespace lockstep

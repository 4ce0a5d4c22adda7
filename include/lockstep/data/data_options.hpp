// DataOptions: what a run trains on, and where it lies.
#pragma once

#include <lockstep/data/data.hpp>

#include <filesystem>
#include <string_view>

namespace lockstep {

enum class DataSource { fashion_mnist, synthetic };

// "fashion-mnist", "synthetic". And back; throws Error that names what there is.
std::string_view to_string(DataSource source);
DataSource data_source_from(std::string_view name);

struct DataOptions {
  DataSource source = DataSource::fashion_mnist;
  std::filesystem::path folder = {};  // of Fashion-MNIST's IDX files; empty: where packages put them
  std::filesystem::path text = {};    // for a model that learns text (models.hpp): the file, in the place of images
};

// The images. Throws Error as load_fashion_mnist does.
ImageData load_data(const DataOptions& options);

}  // namespace lockstep

// A small image set as IDX files, for tests that train: the real format, learnable, some seconds' work at most.
#pragma once

#include <lockstep/data/data.hpp>
#include <lockstep/trainer/train_options.hpp>

#include "idx_files.hpp"
#include "scratch_folder.hpp"

#include <string>

namespace lockstep {

inline std::string bytes_of(const at::Tensor& tensor) {
  const at::Tensor bytes = tensor.to(at::kByte).contiguous();
  return {static_cast<const char*>(bytes.const_data_ptr()), static_cast<size_t>(bytes.numel())};
}

inline void write_small_images(const ScratchFolder& folder, int64_t train_size, int64_t test_size) {
  const ImageData data = synthetic_images(train_size, test_size);
  const auto write = [&](const std::string& name, const Dataset& set) {
    const auto count = static_cast<uint32_t>(set.size());
    folder.write(name + "-images-idx3-ubyte", idx_bytes({count, 28, 28}, bytes_of(set.x)));
    folder.write(name + "-labels-idx1-ubyte", idx_bytes({count}, bytes_of(set.y)));
  };
  write("train", data.train);
  write("t10k", data.test);
}

}  // namespace lockstep

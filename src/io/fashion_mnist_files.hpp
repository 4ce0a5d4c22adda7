// Names the four files of Fashion-MNIST, and finds the folder that has them.
#pragma once

#include <array>
#include <filesystem>
#include <string>
#include <vector>

namespace lockstep::io {

inline constexpr const char* train_images = "train-images-idx3-ubyte";
inline constexpr const char* train_labels = "train-labels-idx1-ubyte";
inline constexpr const char* test_images = "t10k-images-idx3-ubyte";
inline constexpr const char* test_labels = "t10k-labels-idx1-ubyte";
inline constexpr std::array fashion_mnist_files = {train_images, train_labels, test_images, test_labels};

// Returns "" if `dir` has all four files, plain or as .gz. Otherwise says what is missing, or why that cannot be seen.
std::string what_lacks(const std::filesystem::path& dir);

// The first of `places` that has all four files. Throws Error, which says what each place lacks, and what to do.
std::filesystem::path find_fashion_mnist(const std::vector<std::filesystem::path>& places);

}  // namespace lockstep::io

// Finds the folder that has Fashion-MNIST's files.
#pragma once

#include <filesystem>
#include <vector>

namespace lockstep {

// Lists the folders in which load_fashion_mnist() looks if none is given, in order. The last is
// fashion_mnist_download_place(), if there is one.
std::vector<std::filesystem::path> fashion_mnist_places();

// Gives the first of `places` that has all four files. Throws Error, which says what each place lacks, and what to do.
std::filesystem::path find_fashion_mnist(const std::vector<std::filesystem::path>& places);

}  // namespace lockstep

// fashion_mnist_places: where load_fashion_mnist() looks if no folder is given.
#pragma once

#include <filesystem>
#include <vector>

namespace lockstep {

// The folders, in order. The last is fashion_mnist_download_place(), if there is one.
std::vector<std::filesystem::path> fashion_mnist_places();

}  // namespace lockstep

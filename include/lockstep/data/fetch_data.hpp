// fetch_data: downloads Fashion-MNIST where no package provides it.
//
// Each file is checked against its known MD5 sum and appears under its name only when it is complete and right. Thread-
// safe for different folders.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <stop_token>
#include <string>
#include <vector>

namespace lockstep {

struct FetchProgress {
  std::string file;   // its name, without the folder
  int64_t done = 0;   // bytes
  int64_t total = 0;  // bytes; 0 while it is not known
};

struct FetchOptions {
  // Where the four files are, http(s):// or file://, tried in this order. Empty: the data set's own place, then its
  // repository.
  std::vector<std::string> base_urls = {};
  std::function<void(const FetchProgress&)> on_progress = {};  // often, on the calling thread
  std::stop_token stop = {};  // a request ends the download with an Error; finished files stay
};

// Puts Fashion-MNIST's four .gz files into `dir`, which is made if need be. Files that are there with the right sum are
// kept and not downloaded again. Throws Error that names the file or the URL, the reason and what to do: no connection,
// nothing received for 30 s, an error page, a wrong sum, a folder or a disk that does not take the file. Nothing half
// is left behind.
void fetch_fashion_mnist(const std::filesystem::path& dir, const FetchOptions& options = {});

}  // namespace lockstep

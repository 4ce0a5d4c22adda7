// fetch_data: downloads Fashion-MNIST where no package provides it.
//
// Only this needs libcurl, hence the component of its own: find_package(lockstep COMPONENTS data), and link
// lockstep::data. Each file is checked against its known SHA-256. A file gets its name only when complete and right.
// Thread-safe for different folders.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <stop_token>
#include <string>
#include <vector>

namespace lockstep {

struct FetchProgress {
  std::string file;   // the file's name, without the folder
  int64_t done = 0;   // bytes received
  int64_t total = 0;  // bytes of the file; 0 while this is not known
};

struct FetchOptions {
  // URLs of folders that have the four files, http(s):// or file://. They are tried in this order. Empty: the data
  // set's own site is tried, then its repository.
  std::vector<std::string> base_urls = {};
  std::function<void(const FetchProgress&)> on_progress = {};  // called often, on the calling thread
  std::stop_token stop = {};  // a request ends the download with an Error; finished files stay
};

// Puts Fashion-MNIST's four .gz files into `dir`, and makes the folder if it is missing. A file with the right sum is
// kept, and not downloaded again. No half file is left behind. Throws Error, which names the file or the URL, the
// reason and what to do: no connection, nothing received for 30 s, an error page, a wrong sum, or a folder or disk that
// does not take the file.
void fetch_fashion_mnist(const std::filesystem::path& dir, const FetchOptions& options = {});

// Gives the folder where load_fashion_mnist() looks after the place of Debian's package: lockstep/fashion-mnist in
// $XDG_DATA_HOME, or else in ~/.local/share. Gives "" if neither XDG_DATA_HOME nor HOME holds an absolute path.
std::filesystem::path fashion_mnist_download_place();

}  // namespace lockstep

// Finds and reads Fashion-MNIST's files, or MNIST's.
#include <fcntl.h>
#include <unistd.h>
#include <lockstep/base/error.hpp>
#include <lockstep/data/data.hpp>
#include <lockstep/data/fetch_data.hpp>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <future>
#include <system_error>

#include "data_digests.hpp"
#include "fashion_mnist_places.hpp"
#include "io/idx.hpp"
#include "io/reason.hpp"

namespace lockstep {
namespace {

constexpr std::array files_of_set = {"train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte",
                                     "t10k-labels-idx1-ubyte"};
constexpr int64_t classes = 10;
constexpr int64_t image_side = 28;

// Returns "" if `dir` has all four files, plain or as .gz. Otherwise says what is missing, or why nobody can look.
std::string what_lacks(const std::filesystem::path& dir) {
  std::error_code error;
  const auto type = std::filesystem::status(dir, error).type();
  if (type == std::filesystem::file_type::not_found) return "no such folder";
  if (type == std::filesystem::file_type::none) return error.message();
  if (type != std::filesystem::file_type::directory) return "it is not a folder";
  // Checks that this process may search the folder; otherwise the folder would seem to lack the files.
  if (::faccessat(AT_FDCWD, dir.c_str(), X_OK, AT_EACCESS) != 0) return io::reason(errno);
  std::string missing;
  for (const char* name : files_of_set) {
    if (io::find_idx(dir, name).empty()) missing += (missing.empty() ? "it lacks " : ", ") + std::string(name);
  }
  return missing.empty() ? "" : missing + " (plain or .gz)";
}

Dataset load_set(const std::filesystem::path& dir, const char* images_name, const char* labels_name) {
  std::filesystem::path images_file = io::find_idx(dir, images_name);
  std::filesystem::path labels_file = io::find_idx(dir, labels_name);
  at::Tensor images = io::read_idx(images_file, 3);
  at::Tensor labels = io::read_idx(labels_file, 1);

  if (images.size(0) == 0) throw Error("'" + images_file.string() + "' holds no images", {Error::file});
  if (images.size(1) != image_side || images.size(2) != image_side) {
    throw Error("'" + images_file.string() + "' holds images of " + std::to_string(images.size(1)) + " x " +
                    std::to_string(images.size(2)) + " pixels; expected 28 x 28",
                {Error::file});
  }
  if (images.size(0) != labels.size(0)) {
    throw Error("'" + images_file.string() + "' holds " + std::to_string(images.size(0)) + " images, but '" +
                    labels_file.string() + "' holds " + std::to_string(labels.size(0)) + " labels",
                {Error::file});
  }
  auto [largest, position] = labels.max(0);
  if (largest.item<int64_t>() >= classes) {
    throw Error("'" + labels_file.string() + "': label " + std::to_string(largest.item<int64_t>()) + " at position " +
                    std::to_string(position.item<int64_t>()) + "; expected 0 to 9",
                {Error::file});
  }
  return {images.unsqueeze(1), labels.to(at::kLong)};
}

// Checks plain files by known digests, since only a gzipped file has a checksum. The right bits are known if the files
// have as many images or labels as a known set, and another file of that set lies beside.
void check_plain_files(const std::filesystem::path& folder, const ImageData& data) {
  constexpr std::array<int64_t, 4> counts = {60000, 60000, 10000, 10000};  // the counts of both known sets
  std::array<std::filesystem::path, 4> plain;
  for (size_t i = 0; i < plain.size(); ++i) {
    const auto file = io::find_idx(folder, files_of_set[i]);
    const int64_t count = (i < 2 ? data.train : data.test).size();
    if (count == counts[i] && std::ifstream(file, std::ios::binary).get() == 0) plain[i] = file;  // gzip begins with 31
  }
  if (std::all_of(plain.begin(), plain.end(), [](const auto& file) { return file.empty(); })) return;
  const DataDigests digests = digests_of(data);
  const auto is_of = [&](const KnownImages& known, const DataPart& part) {
    return digests.*part.digest == known.digests.*part.digest;
  };
  for (const KnownImages& known : known_images()) {
    const auto good =
        std::find_if(kDataParts.begin(), kDataParts.end(), [&](const auto& part) { return is_of(known, part); });
    if (good == kDataParts.end()) continue;
    for (size_t i = 0; i < plain.size(); ++i) {
      const DataPart& part = kDataParts[i];
      const bool is_known = std::any_of(known_images().begin(), known_images().end(),
                                        [&](const KnownImages& one) { return is_of(one, part); });
      if (plain[i].empty() || is_known) continue;
      throw Error(
          "'" + plain[i].string() + "' is damaged: its SHA-256 is " + digests.*part.digest + ", and that of " +
              known.name + ", whose " + good->name + " lie beside it, is " + known.digests.*part.digest +
              "; take another copy. If the values are meant to be others, gzip the file, whose own checksum then "
              "guards it",
          {Error::file});
    }
  }
}

std::filesystem::path absolute_path_from(const char* variable) {
  const char* value = std::getenv(variable);
  std::filesystem::path path = value == nullptr ? "" : value;
  return path.is_absolute() ? path : std::filesystem::path();
}

}  // namespace

std::filesystem::path fashion_mnist_download_place() {
  std::filesystem::path data = absolute_path_from("XDG_DATA_HOME");
  if (data.empty()) {
    std::filesystem::path home = absolute_path_from("HOME");
    if (home.empty()) return {};
    data = home / ".local" / "share";
  }
  return data / "lockstep" / "fashion-mnist";
}

std::vector<std::filesystem::path> fashion_mnist_places() {
  std::vector<std::filesystem::path> places = {"/usr/share/datasets/fashion-mnist"};
  if (auto place = fashion_mnist_download_place(); !place.empty()) places.push_back(place);
  return places;
}

std::filesystem::path find_fashion_mnist(const std::vector<std::filesystem::path>& places) {
  std::string looked_at;
  for (const auto& place : places) {
    std::string missing = what_lacks(place);
    if (missing.empty()) return place;
    looked_at += "\n  " + place.string() + ": " + missing;
  }
  throw Error(
      "Fashion-MNIST was not found in any of its usual places:" + looked_at +
          "\nInstall Debian's package dataset-fashion-mnist, or run `lockstep fetch-data`, or name a folder with "
          "the four IDX files (`data_dir` DIR), or train on a stand-in (`data` synthetic)",
      {Error::file});
}

ImageData load_fashion_mnist(const std::filesystem::path& dir) {
  std::filesystem::path folder = dir.empty() ? find_fashion_mnist(fashion_mnist_places()) : dir;
  std::string missing = what_lacks(folder);
  if (!missing.empty())
    throw Error("cannot load Fashion-MNIST from '" + folder.string() + "': " + missing, {Error::file});
  auto test = std::async(load_set, folder, files_of_set[2], files_of_set[3]);  // unpacks while this thread does
  Dataset train = load_set(folder, files_of_set[0], files_of_set[1]);
  ImageData data{.train = std::move(train), .test = test.get(), .source = folder.string(), .synthetic = false};
  check_plain_files(folder, data);
  return data;
}

}  // namespace lockstep

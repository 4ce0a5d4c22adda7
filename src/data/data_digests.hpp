// DataDigests: tells two data sets of equal size apart, so that all processes, and a resumed run, train on the same
// data.
#pragma once

#include <lockstep/data/data.hpp>

#include <array>
#include <string>

namespace lockstep {

// Holds SHA-256 in hexadecimal digits. For images it is that of the unpacked IDX file with these values.
struct DataDigests {
  std::string train_images;
  std::string train_labels;
  std::string test_images;
  std::string test_labels;
  bool operator==(const DataDigests&) const = default;
};

// Describes one of the digests: the member, the key in files, and the name for people.
struct DataPart {
  std::string DataDigests::*digest;
  const char* key;
  const char* name;
};
inline constexpr std::array<DataPart, 4> kDataParts = {{
    {&DataDigests::train_images, "train_images", "training samples"},
    {&DataDigests::train_labels, "train_labels", "training targets"},
    {&DataDigests::test_images, "test_images", "test samples"},
    {&DataDigests::test_labels, "test_labels", "test targets"},
}};

// Reads all of the data once: some 50 ms for Fashion-MNIST's.
DataDigests digests_of(const ImageData& data);

// Digests samples of any kind: SHA-256 of types, sizes and bytes. If a function reads the samples, their number and
// version stand for the bytes.
DataDigests digests_of(const Samples& train, const Samples& test);

// Describes a well-known data set, whose files have the names of Fashion-MNIST's.
struct KnownImages {
  const char* name;
  DataDigests digests;
};
const std::array<KnownImages, 2>& known_images();  // Fashion-MNIST, MNIST

// Tells whether these are Fashion-MNIST's files. MNIST's pass every other check, because sizes and counts are the same.
bool is_fashion_mnist(const DataDigests& digests);
bool has_images_of_mnist(const DataDigests& digests);

}  // namespace lockstep

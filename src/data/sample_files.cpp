#include <ATen/Functions.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <lockstep/base/error.hpp>
#include <lockstep/data/sample_files.hpp>

#include "base/classic.hpp"
#include "base/scramble.hpp"
#include "io/digest.hpp"
#include "io/reason.hpp"
#include "io/safetensors.hpp"

#include <algorithm>
#include <cerrno>
#include <map>
#include <memory>
#include <numeric>
#include <system_error>
#include <utility>

namespace lockstep {
namespace {

namespace fs = std::filesystem;

constexpr uint64_t kFileDraws = 0x736861726473;  // sets these draws apart from others of the same seed

struct SampleFile {
  fs::path file;
  io::FileLayout layout;
  int64_t first;  // the number of the file's first sample
  int64_t size;   // the number of samples
};

[[noreturn]] void refuse_file(const fs::path& file, const std::string& why) {
  throw Error("the data file '" + file.string() + "' " + why, {Error::file});
}

// Describes rows, "float [n, 3]", in which all files must agree.
std::string row_text(const io::TensorPlace& place) {
  std::string text = c10::toString(place.type) + std::string(" [n");
  for (size_t i = 1; i < place.shape.size(); ++i) text += ", " + std::to_string(place.shape[i]);
  return text + "]";
}

std::map<std::string, std::string> rows_by_name(const io::FileLayout& layout) {
  std::map<std::string, std::string> rows;
  for (const auto& place : layout.tensors) rows[place.name] = row_text(place);
  return rows;
}

int64_t samples_in_file(const fs::path& file, const io::FileLayout& layout, const Samples::FileOptions& options) {
  const auto rows = rows_by_name(layout);
  for (const auto& name : {options.x, options.y}) {
    if (rows.contains(name)) continue;
    std::string names;
    for (const auto& [other, row] : rows) names += (names.empty() ? "'" : ", '") + other + "'";
    refuse_file(file, "has no tensor '" + name + "', but " + (names.empty() ? "none" : names) +
                          "; name the samples and the targets in Samples::FileOptions::x and y");
  }
  for (const auto& place : layout.tensors) {
    if (!place.shape.empty() && place.shape[0] == layout.tensors[0].shape[0]) continue;
    refuse_file(file, "has tensors of unequal length: '" + layout.tensors[0].name + "' and '" + place.name +
                          "'; each needs a row for each of the file's samples");
  }
  return layout.tensors[0].shape[0];
}

void check_like_first(const SampleFile& one, const SampleFile& first) {
  const auto mine = rows_by_name(one.layout), theirs = rows_by_name(first.layout);
  const auto refuse = [&](const std::string& why) {
    refuse_file(one.file, why + "; all files of a data set need the same tensors");
  };
  const std::string first_file = "'" + first.file.string() + "'";
  for (const auto& [name, row] : theirs) {
    const auto found = mine.find(name);
    if (found == mine.end())
      refuse("has no tensor '" + name + "', which " + first_file + " has of " + row);
    else if (found->second != row)
      refuse("has '" + name + "' of " + found->second + ", and " + first_file + " has it of " + row);
  }
  for (const auto& [name, row] : mine) {
    if (!theirs.contains(name)) refuse("has a tensor '" + name + "', which " + first_file + " lacks");
  }
}

std::vector<SampleFile> opened_files(const std::vector<fs::path>& files, const Samples::FileOptions& options) {
  if (files.empty()) throw Error("samples_of: there is no file; give some");
  if (options.shuffle_buffer < 1) {
    throw Error("samples_of: the shuffle buffer is " + std::to_string(options.shuffle_buffer) +
                " samples; expected 1 or more");
  }
  std::vector<SampleFile> opened;
  int64_t first = 0;
  for (const auto& file : files) {
    io::FileLayout layout = io::read_layout(file);
    const int64_t size = samples_in_file(file, layout, options);
    opened.push_back({file, std::move(layout), first, size});
    check_like_first(opened.back(), opened.front());
    first += size;
  }
  if (first == 0)
    throw Error("samples_of: no file has a sample, neither '" + files[0].string() + "' nor the others", {Error::file});
  return opened;
}

std::string version_of_files(const std::vector<SampleFile>& opened) {
  Classic<std::ostringstream> text;
  for (const auto& one : opened) {
    text << one.file.filename().string() << '\n' << one.layout.size << '\n';
    for (const auto& place : one.layout.tensors) {
      text << place.name << ' ' << row_text(place) << ' ' << one.size << ' ' << place.begin << '\n';
    }
    for (const auto& [key, value] : one.layout.metadata) text << key << '\n' << value << '\n';
  }
  return "files " + io::sha256_of(text.str());
}

// FileRows: reads rows of a safetensors file's tensors, each from its place, without the rest of the file.
//
// Use it from one thread. Cost: one call of the system for rows that follow each other.
class FileRows {
 public:
  // Opens the file. Throws Error, which names the file, if that fails or if the file no longer has this size.
  FileRows(fs::path file, uint64_t size)
      : file_(std::move(file)), descriptor_(open(file_.c_str(), O_RDONLY | O_CLOEXEC)) {
    if (descriptor_ < 0) fail(io::reason(errno));
    struct stat now {};
    const int error = fstat(descriptor_, &now) == 0 ? 0 : errno;
    if (error == 0 && static_cast<uint64_t>(now.st_size) == size) return;
    close(descriptor_);
    if (error != 0) fail(io::reason(error));
    fail("it has " + std::to_string(now.st_size) + " bytes, and had " + std::to_string(size) +
         " when the run began; data must not change while they are trained on");
  }
  ~FileRows() { close(descriptor_); }
  FileRows& operator=(FileRows&&) = delete;

  // Reads the rows [row, row + count) of the tensor at this place. Give an `into` that has room for them. Throws Error,
  // which names the file, if the rows cannot be read.
  void read(const io::TensorPlace& place, int64_t row, int64_t count, void* into) const {
    const uint64_t of_row = (place.end - place.begin) / static_cast<uint64_t>(place.shape[0]);
    uint64_t at = place.begin + static_cast<uint64_t>(row) * of_row, left = static_cast<uint64_t>(count) * of_row;
    for (auto* here = static_cast<char*>(into); left > 0;) {
      const ssize_t done = pread(descriptor_, here, left, static_cast<off_t>(at));
      if (done < 0 && errno == EINTR) continue;
      if (done < 0) fail(io::reason(errno));
      if (done == 0) fail("it ends at byte " + std::to_string(at) + ": somebody has cut it since the run began");
      here += done;
      at += static_cast<uint64_t>(done);
      left -= static_cast<uint64_t>(done);
    }
  }

 private:
  [[noreturn]] void fail(const std::string& why) const {
    throw Error("cannot read '" + file_.string() + "': " + why, {Error::file});
  }

  const fs::path file_;
  const int descriptor_;
};

// Reads samples by their numbers.
class FileReader {
 public:
  FileReader(std::vector<SampleFile> opened, Samples::FileOptions options)
      : files_(std::move(opened)), options_(std::move(options)) {}

  Dataset operator()(const std::vector<int64_t>& numbers) const {
    std::map<size_t, std::vector<Row>> by_file;
    for (size_t row = 0; row < numbers.size(); ++row) {
      const size_t one = file_of(numbers[row]);
      by_file[one].push_back({static_cast<int64_t>(row), numbers[row] - files_[one].first});
    }
    std::map<std::string, at::Tensor> tensors;
    for (const auto& place : files_[0].layout.tensors) {
      auto sizes = place.shape;
      sizes[0] = static_cast<int64_t>(numbers.size());
      tensors[place.name] = at::empty(sizes, place.type);
    }
    for (const auto& [one, rows] : by_file) read(files_[one], rows, tensors);
    for (const auto& [name, tensor] : tensors) io::check_bool(tensor, name);
    Dataset samples{tensors.at(options_.x), tensors.at(options_.y)};
    tensors.erase(options_.x);
    tensors.erase(options_.y);
    samples.more = std::move(tensors);
    return options_.transform ? options_.transform(std::move(samples)) : samples;
  }

 private:
  struct Row {
    int64_t of_batch, of_file;
  };

  size_t file_of(int64_t number) const {
    const auto behind = std::upper_bound(files_.begin(), files_.end(), number,
                                         [](int64_t wanted, const SampleFile& one) { return wanted < one.first; });
    return static_cast<size_t>(behind - files_.begin()) - 1;
  }

  // Reads together the rows that follow each other both in the file and in the batch.
  static void read(const SampleFile& one, const std::vector<Row>& rows,
                   const std::map<std::string, at::Tensor>& tensors) {
    const FileRows file(one.file, one.layout.size);
    for (size_t begin = 0, end = 0; begin < rows.size(); begin = end) {
      for (end = begin + 1; end < rows.size() && rows[end].of_file == rows[end - 1].of_file + 1 &&
                            rows[end].of_batch == rows[end - 1].of_batch + 1;) {
        ++end;
      }
      const auto count = static_cast<int64_t>(end - begin);
      for (const auto& place : one.layout.tensors) {
        const at::Tensor part = tensors.at(place.name).narrow(0, rows[begin].of_batch, count);
        file.read(place, rows[begin].of_file, count, part.mutable_data_ptr());
      }
    }
  }

  const std::vector<SampleFile> files_;
  const Samples::FileOptions options_;
};

// Draws numbers from 0 to below a limit. They depend on the key alone.
class Draws {
 public:
  explicit Draws(uint64_t key) : key_(key) {}
  size_t below(size_t limit) { return static_cast<size_t>(scramble(key_ += kGolden) % limit); }

 private:
  uint64_t key_;
};

template <class Value>
void shuffle_by(std::vector<Value>& values, Draws& draws) {
  for (size_t left = values.size(); left > 1; --left) std::swap(values[left - 1], values[draws.below(left)]);
}

at::Tensor shuffled(const std::vector<std::pair<int64_t, int64_t>>& opened, int64_t buffer, uint64_t seed,
                    int64_t epoch) {
  Draws draws(mix({seed, static_cast<uint64_t>(epoch), kFileDraws}));
  auto in_turn = opened;
  shuffle_by(in_turn, draws);
  const int64_t size = std::accumulate(opened.begin(), opened.end(), int64_t{0},
                                       [](int64_t sum, const auto& one) { return sum + one.second; });
  at::Tensor order = at::empty({size}, at::TensorOptions(at::kLong));
  auto* next = order.mutable_data_ptr<int64_t>();
  std::vector<int64_t> held;
  for (const auto& [first, count] : in_turn) {
    for (int64_t number = first; number < first + count; ++number) {
      if (static_cast<int64_t>(held.size()) < buffer) {
        held.push_back(number);
      } else {
        *next++ = std::exchange(held[draws.below(held.size())], number);
      }
    }
  }
  shuffle_by(held, draws);
  std::copy(held.begin(), held.end(), next);
  return order;
}

}  // namespace

Samples samples_of(const std::vector<fs::path>& files, const Samples::FileOptions& options) {
  auto opened = opened_files(files, options);
  std::vector<std::pair<int64_t, int64_t>> places;  // the first sample's number and the size of each file
  for (const auto& one : opened) places.emplace_back(one.first, one.size);
  const int64_t size = opened.back().first + opened.back().size;
  const std::string version = version_of_files(opened);
  const auto reader = std::make_shared<const FileReader>(std::move(opened), options);
  return Samples(
             size, [reader](const std::vector<int64_t>& numbers) { return (*reader)(numbers); }, version)
      .read_ahead(options.read_ahead)
      .with_order([places, buffer = options.shuffle_buffer](
                      uint64_t seed, int64_t epoch) { return shuffled(places, buffer, seed, epoch); },
                  "shuffle buffer " + std::to_string(options.shuffle_buffer));
}

std::vector<fs::path> sample_files(const fs::path& folder) {
  std::vector<fs::path> files;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    if (entry.path().extension() == ".safetensors") files.push_back(entry.path());
  }
  if (error) throw Error("cannot read the folder '" + folder.string() + "': " + error.message(), {Error::file});
  if (files.empty()) throw Error("the folder '" + folder.string() + "' has no file *.safetensors", {Error::file});
  std::sort(files.begin(), files.end());
  return files;
}

}  // namespace lockstep

#include "safetensors.hpp"

#include <ATen/Functions.h>
#include <lockstep/base/error.hpp>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <system_error>
#include <unordered_set>

#include "atomic_file.hpp"
#include "base/classic.hpp"
#include "digest.hpp"
#include "not_json.hpp"
#include "reason.hpp"

namespace lockstep::io {
namespace {

static_assert(std::endian::native == std::endian::little, "the data are copied as they lie in memory");

using Json = nlohmann::json;

struct TypeName {
  const char* name;
  at::ScalarType type;
};
// The order is that of the data in a file: the widest type first, so that every tensor begins at a multiple of its
// elements' size. Types of one width stand in the Python package's order: so both write equal files of equal tensors.
constexpr std::array type_names = {
    TypeName{"U64", at::kUInt64},
    TypeName{"I64", at::kLong},
    TypeName{"F64", at::kDouble},
    TypeName{"C64", at::kComplexFloat},
    TypeName{"F32", at::kFloat},
    TypeName{"U32", at::kUInt32},
    TypeName{"I32", at::kInt},
    TypeName{"BF16", at::kBFloat16},
    TypeName{"F16", at::kHalf},
    TypeName{"U16", at::kUInt16},
    TypeName{"I16", at::kShort},
    TypeName{"F8_E5M2FNUZ", at::kFloat8_e5m2fnuz},
    TypeName{"F8_E4M3FNUZ", at::kFloat8_e4m3fnuz},
    TypeName{"F8_E8M0", at::kFloat8_e8m0fnu},
    TypeName{"F8_E4M3", at::kFloat8_e4m3fn},
    TypeName{"F8_E5M2", at::kFloat8_e5m2},
    TypeName{"I8", at::kChar},
    TypeName{"U8", at::kByte},
    TypeName{"BOOL", at::kBool},
};

constexpr uint64_t largest_header = 100'000'000;  // other readers of the format have the same limit
constexpr size_t most_tensors = 1 << 17;          // each takes some 2 kB of memory while the header is read
constexpr int deepest = 8;                        // three levels are in use: header, tensor, shape
constexpr const char* metadata_key = "__metadata__";

// ---- writing

size_t type_index(const at::Tensor& tensor) {
  auto type = std::find_if(type_names.begin(), type_names.end(),
                           [&](const TypeName& entry) { return entry.type == tensor.scalar_type(); });
  return static_cast<size_t>(type - type_names.begin());
}

// Sorts by type, then by name. Throws Error if the format cannot hold the tensors.
NamedTensors in_file_order(NamedTensors tensors) {
  if (const std::string why = what_a_file_lacks(tensors); !why.empty()) throw Error(why, {Error::file});
  auto key = [](const auto& entry) { return std::pair(type_index(entry.second), entry.first); };
  std::sort(tensors.begin(), tensors.end(), [&](const auto& a, const auto& b) { return key(a) < key(b); });
  return tensors;
}

std::string header_of(const NamedTensors& tensors, const std::map<std::string, std::string>& metadata) {
  nlohmann::ordered_json header = {{metadata_key, {{"format", "pt"}}}};
  for (const auto& [key, value] : metadata) header[metadata_key][key] = value;
  uint64_t offset = 0;
  auto& entries = header.get_ref<nlohmann::ordered_json::object_t&>();  // a list: operator[] would go through all of it
  std::unordered_set<std::string> names{metadata_key};
  for (const auto& [name, tensor] : tensors) {
    if (!names.insert(name).second) throw Error("two tensors are named '" + name + "'", {Error::file});
    uint64_t end = offset + tensor.nbytes();
    entries.emplace_back(name, nlohmann::ordered_json{{"dtype", type_names[type_index(tensor)].name},
                                                      {"shape", tensor.sizes().vec()},
                                                      {"data_offsets", {offset, end}}});
    offset = end;
  }
  std::string text;
  try {
    text = header.dump();
  } catch (const Json::exception&) {
    throw Error("a tensor's name, or the metadata, is not UTF-8", {Error::file});
  }
  text.resize((text.size() + 7) / 8 * 8, ' ');
  return text;
}

// ---- reading

// Reads along and refuses two things: a key that an object holds twice (parse would take the last), and text that would
// take memory out of proportion.
class HeaderCheck : public nlohmann::json_sax<Json> {
 public:
  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(number_integer_t) override { return true; }
  bool number_unsigned(number_unsigned_t) override { return true; }
  bool number_float(number_float_t, const string_t&) override { return true; }
  bool string(string_t&) override { return true; }
  bool binary(binary_t&) override { return true; }
  bool start_object(size_t) override {
    keys_.emplace_back();
    return enter();
  }
  bool key(string_t& name) override {
    if (keys_.size() == 1 && keys_[0].size() > most_tensors) {
      throw Error("it has more than " + std::to_string(most_tensors) + " tensors", {Error::file});
    }
    if (!keys_.back().insert(name).second) throw Error("the name '" + name + "' occurs twice", {Error::file});
    return true;
  }
  bool end_object() override {
    keys_.pop_back();
    return leave();
  }
  bool start_array(size_t) override { return enter(); }
  bool end_array() override { return leave(); }
  bool parse_error(size_t, const std::string&, const Json::exception&) override { return false; }  // parse will say it

 private:
  bool enter() {
    if (++depth_ > deepest)
      throw Error("its header is nested deeper than " + std::to_string(deepest) + " levels", {Error::file});
    return true;
  }
  bool leave() {
    --depth_;
    return true;
  }

  int depth_ = 0;
  std::vector<std::unordered_set<std::string>> keys_;  // the keys of the objects that are open
};

std::vector<uint64_t> unsigned_numbers(const Json& entry, const char* key) {
  if (!entry.contains(key) || !entry[key].is_array())
    throw Error("it has no list '" + std::string(key) + "'", {Error::file});
  std::vector<uint64_t> numbers;
  for (const Json& number : entry[key]) {
    if (!number.is_number_unsigned() || number.get<uint64_t>() > std::numeric_limits<int64_t>::max()) {
      throw Error("its '" + std::string(key) + "' holds " + number.dump() + ", which is not a length", {Error::file});
    }
    numbers.push_back(number.get<uint64_t>());
  }
  return numbers;
}

// Reads an entry, which counts its bytes from the beginning of the data.
TensorPlace parse_entry(const std::string& name, const Json& json, uint64_t data_size) {
  if (!json.is_object()) throw Error("it is not described by an object", {Error::file});
  if (!json.contains("dtype") || !json["dtype"].is_string()) throw Error("it has no 'dtype'", {Error::file});
  auto type = std::find_if(type_names.begin(), type_names.end(),
                           [&](const TypeName& entry) { return json["dtype"] == entry.name; });
  if (type == type_names.end()) throw Error("its type " + json["dtype"].dump() + " is unknown", {Error::file});

  std::vector<uint64_t> offsets = unsigned_numbers(json, "data_offsets");
  if (offsets.size() != 2 || offsets[0] > offsets[1] || offsets[1] > data_size) {
    throw Error("its data_offsets " + json["data_offsets"].dump() + " do not lie within the file's " +
                    std::to_string(data_size) + " bytes of data",
                {Error::file});
  }
  std::vector<uint64_t> lengths = unsigned_numbers(json, "shape");
  bool empty = std::count(lengths.begin(), lengths.end(), 0) > 0;
  int64_t bytes = static_cast<int64_t>(c10::elementSize(type->type));
  bool overflow = false;
  for (uint64_t length : lengths) {
    overflow |= __builtin_mul_overflow(bytes, std::max<uint64_t>(length, 1), &bytes);
  }
  if (empty) bytes = 0;
  if (overflow || static_cast<uint64_t>(bytes) != offsets[1] - offsets[0]) {
    throw Error("its shape " + json["shape"].dump() + " of type " + type->name + " does not fill its " +
                    std::to_string(offsets[1] - offsets[0]) + " bytes of data",
                {Error::file});
  }
  return {name, type->type, {lengths.begin(), lengths.end()}, offsets[0], offsets[1]};
}

std::vector<TensorPlace> parse_header(const std::string& text, uint64_t data_size,
                                      std::map<std::string, std::string>& metadata) {
  if (text.empty() || text[0] != '{') throw Error("its header is not a JSON object", {Error::file});
  // The parser would take a zero byte for the header's end, and leave out what follows.
  if (text.find('\0') != text.npos) throw Error("its header is damaged: a byte of it is 0", {Error::file});
  Json header;
  try {
    // Makes two passes, since parse() with a callback walks an object anew at each of its members: 40,000 tensors took
    // a minute.
    HeaderCheck check;
    Json::sax_parse(text, &check);
    header = Json::parse(text);
  } catch (const Json::exception& error) {
    throw Error("its header is not JSON: " + where_not_json(text, error), {Error::file});
  }
  std::vector<TensorPlace> entries;
  for (const auto& [name, json] : header.items()) {
    if (name == metadata_key) {
      for (const auto& [key, value] : json.items()) {
        if (value.is_string()) metadata[key] = value.get<std::string>();
      }
      continue;
    }
    try {
      entries.push_back(parse_entry(name, json, data_size));
    } catch (const Error& error) {
      throw Error("tensor '" + name + "': " + error.what(), error.data());
    }
  }
  std::stable_sort(entries.begin(), entries.end(), [](const TensorPlace& a, const TensorPlace& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  uint64_t covered = 0;
  for (const TensorPlace& entry : entries) {
    if (entry.begin != covered) {
      throw Error("tensor '" + entry.name + "' begins at byte " + std::to_string(entry.begin) + " of the data, but " +
                      std::to_string(covered) + " was expected: tensors overlap or leave a gap",
                  {Error::file});
    }
    covered = entry.end;
  }
  if (covered != data_size) {
    throw Error("its tensors end at byte " + std::to_string(covered) + " of the data, but the file holds " +
                    std::to_string(data_size),
                {Error::file});
  }
  return entries;
}

void read_bytes(std::ifstream& in, void* into, uint64_t bytes) {
  in.read(static_cast<char*>(into), static_cast<std::streamsize>(bytes));
  if (!in) throw Error("reading failed: " + reason(errno), {Error::file});
}

FileLayout read_header(std::ifstream& in, uint64_t file_size) {
  uint64_t header_size = 0;
  if (file_size < sizeof header_size) throw Error("it is too short for a safetensors file", {Error::file});
  read_bytes(in, &header_size, sizeof header_size);
  if (header_size > file_size - sizeof header_size || header_size > largest_header) {
    throw Error("its header is said to have " + std::to_string(header_size) + " bytes, but the file has " +
                    std::to_string(file_size),
                {Error::file});
  }
  std::string header(header_size, '\0');
  read_bytes(in, header.data(), header_size);
  const uint64_t data = sizeof header_size + header_size;
  FileLayout layout{.tensors = {}, .metadata = {}, .size = file_size};
  layout.tensors = parse_header(header, file_size - data, layout.metadata);
  for (auto& place : layout.tensors) {
    place.begin += data;
    place.end += data;
  }
  return layout;
}

NamedTensors read_tensors(std::ifstream& in, const std::vector<TensorPlace>& entries) {
  NamedTensors tensors;
  for (const TensorPlace& entry : entries) {
    at::Tensor tensor = at::empty(entry.shape, entry.type);
    read_bytes(in, tensor.mutable_data_ptr(), entry.end - entry.begin);
    check_bool(tensor, entry.name);
    tensors.emplace_back(entry.name, tensor);
  }
  return tensors;
}

// Opens the file and returns read(in, size). Errors name the file.
template <class Read>
auto read_file(const std::filesystem::path& file, const Read& read) {
  try {
    std::error_code error;
    const uint64_t size = std::filesystem::file_size(file, error);
    if (error) throw Error(error.message(), {Error::file});
    errno = 0;
    std::ifstream in(file, std::ios::binary);
    if (!in) throw Error("opening failed: " + reason(errno), {Error::file});
    return read(in, size);
  } catch (const Error& error) {
    throw Error("cannot read '" + file.string() + "': " + error.what(), error.data());
  }
}

}  // namespace

std::string what_a_file_lacks(const NamedTensors& tensors) {
  for (const auto& [name, tensor] : tensors) {
    const bool is_sparse = tensor.layout() != at::kStrided;
    if (is_sparse || type_index(tensor) == type_names.size()) {
      return "tensor '" + name + "' is " +
             (is_sparse ? "sparse" : std::string("of type ") + c10::toString(tensor.scalar_type())) +
             ", which a safetensors file cannot hold";
    }
  }
  return "";
}

at::Tensor as_in_a_file(const at::Tensor& tensor) {
  return tensor.detach().cpu().contiguous().resolve_conj().resolve_neg();
}

void check_bool(const at::Tensor& tensor, const std::string& name) {
  if (tensor.scalar_type() != at::kBool || !tensor.view(at::kByte).gt(1).any().item<bool>()) return;
  throw Error("tensor '" + name + "' is of type BOOL but holds bytes that are neither 0 nor 1", {Error::file});
}

void write_safetensors(const std::filesystem::path& file, const NamedTensors& tensors,
                       const std::map<std::string, std::string>& metadata, FileSystem& files) {
  NamedTensors sorted;
  std::string header;
  try {
    sorted = in_file_order(tensors);
    header = header_of(sorted, metadata);
  } catch (const Error& error) {
    throw Error("cannot write '" + file.string() + "': " + error.what(), error.data());
  }
  uint64_t header_size = header.size();

  AtomicFile out(file, files);
  out.write(&header_size, sizeof header_size);
  out.write(header);
  for (const auto& [name, tensor] : sorted) {
    const at::Tensor data = as_in_a_file(tensor);
    out.write(data.const_data_ptr(), data.nbytes());
  }
  out.commit();
}

NamedTensors read_safetensors(const std::filesystem::path& file, std::map<std::string, std::string>* metadata) {
  return read_file(file, [&](std::ifstream& in, uint64_t size) {
    FileLayout layout = read_header(in, size);
    NamedTensors tensors = read_tensors(in, layout.tensors);
    if (metadata != nullptr) *metadata = std::move(layout.metadata);
    return tensors;
  });
}

FileLayout read_layout(const std::filesystem::path& file) {
  return read_file(file, [](std::ifstream& in, uint64_t size) { return read_header(in, size); });
}

std::string digest_of(const std::map<std::string, std::string>& metadata, const NamedTensors& tensors) {
  Digest digest;
  for (const auto& [key, value] : metadata) digest.update(key + '\n' + value + '\n');
  for (const auto& [name, tensor] : std::map<std::string, at::Tensor>(tensors.begin(), tensors.end())) {
    digest.update(classic_text('\n', name, ' ', c10::toString(tensor.scalar_type()), ' ', tensor.sizes(), '\n'));
    const at::Tensor data = as_in_a_file(tensor);
    digest.update(data.const_data_ptr(), data.nbytes());
  }
  return digest.hex();
}

void check_digest(std::map<std::string, std::string> metadata, const NamedTensors& tensors) {
  const auto entry = metadata.extract(kDigestKey);
  if (!entry) return;
  if (const auto digest = digest_of(metadata, tensors); digest != entry.mapped()) {
    throw Error("it is damaged: its SHA-256 is " + digest + ", and was " + entry.mapped() + " when it was written",
                {Error::file});
  }
}

}  // namespace lockstep::io

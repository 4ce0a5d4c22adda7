#include <ATen/Functions.h>
#include <lockstep/base/error.hpp>
#include <lockstep/models/text.hpp>

#include <algorithm>
#include <utility>
#include <vector>

#include "io/digest.hpp"
#include "io/read_text.hpp"

namespace lockstep {
namespace {

constexpr int64_t kPartHeldOut = 10;

// Makes sequences of the bytes [begin, end).
Samples sequences(const at::Tensor& bytes, int64_t begin, int64_t end, int64_t context, const std::string& digest) {
  const at::Tensor part = bytes.slice(0, begin, end);
  const auto read = [part, context](const std::vector<int64_t>& numbers) {
    const auto rows = static_cast<int64_t>(numbers.size());
    Dataset samples{at::empty({rows, context}, at::kLong), at::empty({rows, context}, at::kLong)};
    const auto* const from = part.const_data_ptr<uint8_t>();
    auto* const x = samples.x.mutable_data_ptr<int64_t>();
    auto* const y = samples.y.mutable_data_ptr<int64_t>();
    for (int64_t row = 0; row < rows; ++row) {
      const uint8_t* const sequence = from + numbers[static_cast<size_t>(row)] * context;
      for (int64_t i = 0; i < context; ++i) {
        x[row * context + i] = sequence[i];
        y[row * context + i] = sequence[i + 1];
      }
    }
    return samples;
  };
  return {(part.size(0) - 1) / context, read,
          "bytes " + std::to_string(begin) + " to " + std::to_string(end) + " of SHA-256 " + digest + ", context " +
              std::to_string(context)};
}

// The number of bytes of the UTF-8 character that begins at `at`. 0: there is none, or it is not shown.
size_t shown_size(const std::string& bytes, size_t at) {
  const auto byte = [&](size_t i) { return i < bytes.size() ? static_cast<unsigned char>(bytes[i]) : 0; };
  const int first = byte(at), second = byte(at + 1);
  if (first < 0x80) return (first >= ' ' && first != 127) || first == '\n' || first == '\t' ? 1 : 0;
  const size_t size = first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4;
  // Smaller values are control characters, or characters that fit fewer bytes. Larger ones are surrogates or nothing.
  const int least = first == 0xC2 || first == 0xE0 ? 0xA0 : first == 0xF0 ? 0x90 : 0x80;
  const int most = first == 0xED ? 0x9F : first == 0xF4 ? 0x8F : 0xBF;
  if (first < 0xC2 || first > 0xF4 || second < least || second > most) return 0;
  for (size_t i = 2; i < size; ++i) {
    if ((byte(at + i) & 0xC0) != 0x80) return 0;
  }
  return size;
}

}  // namespace

TextData load_text(const std::filesystem::path& file, int64_t context) {
  if (context < 1) throw Error("text: the context is " + std::to_string(context) + " bytes; it must be at least 1");
  std::error_code ignored;
  if (std::filesystem::is_other(file, ignored)) {  // such a file may have no end, or no beginning when it is read again
    throw Error("cannot read the text '" + file.string() + "': it is no regular file; copy it into one", {Error::file});
  }
  const std::string text = io::read_text(file);
  const auto size = static_cast<int64_t>(text.size()), held_out = size / kPartHeldOut;
  if (held_out <= context) {
    throw Error("the text '" + file.string() + "' holds " + std::to_string(size) + " bytes; its last tenth, " +
                std::to_string(held_out) + " bytes, is held out and must be longer than the context, " +
                std::to_string(context) + " bytes; take a longer text, or a smaller context");
  }
  const std::string digest = io::sha256_of(text);
  at::Tensor bytes = at::empty({size}, at::kByte);
  std::copy(text.begin(), text.end(), bytes.mutable_data_ptr<uint8_t>());
  return {.train = sequences(bytes, 0, size - held_out, context, digest),
          .test = sequences(bytes, size - held_out, size, context, digest),
          .source = file.string() + ", " + std::to_string(size) + " bytes, the last " + std::to_string(held_out) +
                    " held out"};
}

std::string readable_text(const std::string& bytes) {
  std::string text;
  for (size_t at = 0; at < bytes.size();) {
    const size_t size = shown_size(bytes, at);
    text += size > 0 ? bytes.substr(at, size) : "\xEF\xBF\xBD";
    at += std::max<size_t>(size, 1);
  }
  return text;
}

}  // namespace lockstep

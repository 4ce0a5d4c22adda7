#include <ATen/Functions.h>
#include <lockstep/base/error.hpp>
#include <lockstep/models/text.hpp>

#include <algorithm>
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

}  // namespace lockstep

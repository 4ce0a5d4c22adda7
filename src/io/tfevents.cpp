#include "tfevents.hpp"

#include <lockstep/base/error.hpp>

#include <array>
#include <bit>
#include <cerrno>
#include <cstring>

#include "file_system.hpp"
#include "reason.hpp"

namespace lockstep::io {
namespace {

static_assert(std::endian::native == std::endian::little, "numbers are copied as they lie in memory");

template <class Number>
std::string bytes_of(Number number) {
  std::string bytes(sizeof number, '\0');
  std::memcpy(bytes.data(), &number, sizeof number);
  return bytes;
}

constexpr std::array<uint32_t, 256> crc_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t rest = byte;
    // The constant is the polynomial, with its bits mirrored.
    for (int bit = 0; bit < 8; ++bit) rest = (rest >> 1) ^ ((rest & 1) != 0 ? 0x82F63B78u : 0);
    table[byte] = rest;
  }
  return table;
}

// Masks a checksum as TensorFlow does, so that a checksum of bytes that hold checksums is not special.
uint32_t masked(uint32_t crc) {
  return ((crc >> 15) | (crc << 17)) + 0xA282EAD8u;
}

// ---- protocol buffers: a field is its number and coding, then the value

enum Coding { varint = 0, eight_bytes = 1, counted = 2, four_bytes = 5 };

std::string varint_of(uint64_t number) {
  std::string bytes;
  for (; number >= 128; number >>= 7) bytes += static_cast<char>((number & 127) | 128);
  return bytes + static_cast<char>(number);
}

std::string field(int number, Coding coding, const std::string& value) {
  return varint_of(static_cast<uint64_t>(number) << 3 | coding) + value;
}

std::string message(int number, const std::string& value) {
  return field(number, counted, varint_of(value.size()) + value);
}

std::string event(double now, int64_t step) {
  return field(1, eight_bytes, bytes_of(now)) + field(2, varint, varint_of(static_cast<uint64_t>(step)));
}

}  // namespace

uint32_t crc32c(const std::string& bytes) {
  static constexpr auto table = crc_table();
  uint32_t crc = ~0u;
  for (const char byte : bytes) crc = table[(crc ^ static_cast<unsigned char>(byte)) & 255] ^ (crc >> 8);
  return ~crc;
}

TfEvents::TfEvents(std::filesystem::path file, double now, int64_t first_step)
    : file_(std::move(file)), fd_(real_files().create(file_)) {
  if (fd_ < 0) throw Error("cannot write '" + file_.string() + "': " + reason(errno), {Error::file});
  append(event(now, 0) + message(3, "brain.Event:2"));
  append(event(now, first_step) + message(7, field(1, varint, varint_of(1))));
}

TfEvents::~TfEvents() {
  if (fd_ >= 0) real_files().close(fd_);
}

void TfEvents::add(double now, int64_t step, const Scalars& scalars) {
  std::string summary;
  for (const auto& [tag, value] : scalars) {
    summary += message(1, message(1, tag) + field(2, four_bytes, bytes_of(static_cast<float>(value))));
  }
  append(event(now, step) + message(5, summary));
}

void TfEvents::append(const std::string& event) {
  const std::string length = bytes_of(static_cast<uint64_t>(event.size()));
  const std::string record = length + bytes_of(masked(crc32c(length))) + event + bytes_of(masked(crc32c(event)));
  for (size_t done = 0; done < record.size();) {
    const ssize_t written = real_files().write(fd_, record.data() + done, record.size() - done);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) throw Error("cannot write '" + file_.string() + "': " + reason(errno), {Error::file});
    done += static_cast<size_t>(written);
  }
}

}  // namespace lockstep::io

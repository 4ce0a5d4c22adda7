// Event files, read back by a reader that shares nothing with the writer but the checksum, which is tested by itself.
#include "io/tfevents.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <map>

#include "support/error_of.hpp"
#include "support/scratch_folder.hpp"

namespace lockstep::io {
namespace tfevents_test {

using testing::Pair;
using testing::UnorderedElementsAre;

template <class Number>
Number number_at(const std::string& bytes, size_t at) {
  Number number;
  std::memcpy(&number, bytes.substr(at, sizeof number).data(), sizeof number);
  return number;
}

uint32_t unmasked(uint32_t crc) {
  const uint32_t rotated = crc - 0xa282ead8u;
  return (rotated >> 17) | (rotated << 15);
}

// The records' contents, after their checksums have been found right.
std::vector<std::string> records_of(const std::string& file) {
  std::vector<std::string> records;
  for (size_t at = 0; at < file.size();) {
    const auto length = number_at<uint64_t>(file, at);
    EXPECT_EQ(unmasked(number_at<uint32_t>(file, at + 8)), crc32c(file.substr(at, 8)));
    records.push_back(file.substr(at + 12, length));
    EXPECT_EQ(records.back().size(), length);
    EXPECT_EQ(unmasked(number_at<uint32_t>(file, at + 12 + length)), crc32c(records.back()));
    at += 16 + length;
  }
  return records;
}

// A protocol buffer's fields by number, as they lie there.
std::multimap<int, std::string> fields_of(const std::string& message) {
  std::multimap<int, std::string> fields;
  size_t at = 0;
  const auto varint = [&] {
    uint64_t number = 0;
    for (int shift = 0;; shift += 7) {
      const auto byte = static_cast<unsigned char>(message.at(at++));
      number |= static_cast<uint64_t>(byte & 127) << shift;
      if (byte < 128) return number;
    }
  };
  while (at < message.size()) {
    const uint64_t key = varint();
    size_t size = key % 8 == 1 ? 8 : 4;
    if (key % 8 == 0) {
      fields.emplace(static_cast<int>(key / 8), std::to_string(varint()));
      continue;
    }
    if (key % 8 == 2) size = varint();
    fields.emplace(static_cast<int>(key / 8), message.substr(at, size));
    at += size;
  }
  return fields;
}

std::string only(const std::multimap<int, std::string>& fields, int number) {
  EXPECT_EQ(fields.count(number), 1u) << "field " << number;
  return fields.count(number) == 1 ? fields.find(number)->second : std::string(8, '\0');
}

TEST(TfEvents, ChecksumsAreCastagnolis) {
  EXPECT_EQ(crc32c("123456789"), 0xe3069283u);
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8a9136aau);  // RFC 3720, appendix B.4
  EXPECT_EQ(crc32c(std::string(32, '\xff')), 0x62a8ab43u);
  EXPECT_EQ(crc32c(""), 0u);
}

TEST(TfEvents, KeepsItsScalars) {
  const ScratchFolder folder;
  {
    TfEvents events(folder / "events.out.tfevents.1.x", 1700000000.25, 300);
    events.add(1700000001.5, 300, {{"loss", 0.75}, {"accuracy/test", 0.5}});
    events.add(1700000002.5, 20000, {{std::string(200, 'n'), -3e-30}});
  }
  const auto records = records_of(folder.read("events.out.tfevents.1.x"));
  ASSERT_EQ(records.size(), 4u);
  const auto first = fields_of(records[0]);
  EXPECT_EQ(number_at<double>(only(first, 1), 0), 1700000000.25);
  EXPECT_EQ(only(first, 3), "brain.Event:2");
  const auto start = fields_of(records[1]);
  EXPECT_EQ(only(start, 2), "300");
  EXPECT_EQ(only(fields_of(only(start, 7)), 1), "1");

  const auto scalars = [&](const std::string& record) {
    std::vector<std::pair<std::string, float>> values;
    for (const auto& [number, value] : fields_of(only(fields_of(record), 5))) {
      EXPECT_EQ(number, 1);
      values.emplace_back(only(fields_of(value), 1), number_at<float>(only(fields_of(value), 2), 0));
    }
    return values;
  };
  EXPECT_EQ(number_at<double>(only(fields_of(records[2]), 1), 0), 1700000001.5);
  EXPECT_EQ(only(fields_of(records[2]), 2), "300");
  EXPECT_THAT(scalars(records[2]), UnorderedElementsAre(Pair("loss", 0.75f), Pair("accuracy/test", 0.5f)));
  EXPECT_EQ(only(fields_of(records[3]), 2), "20000");
  EXPECT_THAT(scalars(records[3]), UnorderedElementsAre(Pair(std::string(200, 'n'), -3e-30f)));
}

TEST(TfEvents, RefusesWhatCannotBeWritten) {
  const ScratchFolder folder;
  EXPECT_THAT(error_of([&] { TfEvents(folder / "none" / "events", 0, 1); }), Fails(Error::file));
  folder.write("events", "");
  EXPECT_THAT(error_of([&] { TfEvents(folder / "events", 0, 1); }), Fails(Error::file));
}

}  // namespace tfevents_test
}  // namespace lockstep::io

// The linker's build ID is read from notes, as ELF lays them out.
#include "base/build_id.hpp"

#include <elf.h>
#include <gtest/gtest.h>

#include <string>

namespace build_id_test {

std::string padded(std::string bytes, size_t alignment) {
  bytes.resize((bytes.size() + alignment - 1) / alignment * alignment, '\xff');
  return bytes;
}

std::string note(const std::string& name, const std::string& content, uint32_t type, size_t alignment) {
  const Elf64_Nhdr header{static_cast<uint32_t>(name.size() + 1), static_cast<uint32_t>(content.size()), type};
  const std::string begin(reinterpret_cast<const char*>(&header), sizeof header);
  return padded(padded(begin + name + '\0', alignment) + content, alignment);
}

std::string id_in(const std::string& notes, size_t alignment) {
  return lockstep::build_id_in_notes(notes.data(), notes.data() + notes.size(), alignment);
}

TEST(BuildId, IsFoundAmongNotesOfEitherAlignment) {
  for (const size_t alignment : {4, 8}) {
    const std::string other = note("stranger", "abc", NT_GNU_BUILD_ID, alignment),
                      id = note("GNU", "\x01\x23\x45\x67\x89\xab\xcd\xef\x11", NT_GNU_BUILD_ID, alignment);
    EXPECT_EQ(id_in(other + id, alignment), "0123456789abcdef") << alignment;
    EXPECT_EQ(id_in(id, alignment), "0123456789abcdef") << alignment;
    EXPECT_EQ(id_in(other, alignment), "");
    EXPECT_EQ(id_in(id.substr(0, 20), alignment), "") << "it is cut off";
  }
}

}  // namespace build_id_test

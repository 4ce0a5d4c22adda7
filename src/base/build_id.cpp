#include "build_id.hpp"

#include <elf.h>
#include <link.h>

#include <cstdint>
#include <cstring>

#include "number_text.hpp"

namespace lockstep {

// A note begins with a header and a name. The name's end and the note's end are padded to the alignment.
std::string build_id_in_notes(const char* note, const char* end, size_t alignment) {
  constexpr size_t bytes_of_id = 8;
  const auto padded = [&](size_t size) { return (size + alignment - 1) / alignment * alignment; };
  while (note + sizeof(ElfW(Nhdr)) <= end) {
    ElfW(Nhdr) header;
    std::memcpy(&header, note, sizeof header);
    const char* const name = note + sizeof header;
    const char* const content = note + padded(sizeof header + header.n_namesz);
    note = content + padded(header.n_descsz);
    if (header.n_type != NT_GNU_BUILD_ID || header.n_namesz != sizeof ELF_NOTE_GNU || content + header.n_descsz > end ||
        std::memcmp(name, ELF_NOTE_GNU, sizeof ELF_NOTE_GNU) != 0) {
      continue;
    }
    std::string id;
    for (size_t i = 0; i < header.n_descsz && i < bytes_of_id; ++i) {
      id += hex_text(static_cast<uint8_t>(content[i]), 2);
    }
    return id;
  }
  return "";
}

namespace {

std::string id_of_object(const dl_phdr_info& object) {
  for (int i = 0; i < object.dlpi_phnum; ++i) {
    const auto& part = object.dlpi_phdr[i];
    if (part.p_type != PT_NOTE) continue;
    // The loader gives addresses as numbers. NOLINTNEXTLINE(performance-no-int-to-ptr)
    const auto* const begin = reinterpret_cast<const char*>(object.dlpi_addr + part.p_vaddr);
    const std::string id = build_id_in_notes(begin, begin + part.p_memsz, part.p_align == 8 ? 8 : 4);
    if (!id.empty()) return id;
  }
  return "";
}

bool object_holds(const dl_phdr_info& object, uintptr_t address) {
  for (int i = 0; i < object.dlpi_phnum; ++i) {
    const auto& part = object.dlpi_phdr[i];
    const uintptr_t begin = object.dlpi_addr + part.p_vaddr;
    if (part.p_type == PT_LOAD && address >= begin && address < begin + part.p_memsz) return true;
  }
  return false;
}

}  // namespace

// The loader lists the program as its first object.
std::string build_id() {
  struct Search {
    bool is_first = true;
    std::string id = {};
  } search;
  dl_iterate_phdr(
      [](dl_phdr_info* object, size_t, void* data) {
        auto& search = *static_cast<Search*>(data);
        const bool has_lockstep = object_holds(*object, reinterpret_cast<uintptr_t>(&build_id));
        if (search.is_first) search.id = id_of_object(*object);
        if (!search.is_first && has_lockstep) search.id += "+" + id_of_object(*object);
        search.is_first = false;
        return has_lockstep ? 1 : 0;
      },
      &search);
  return search.id;
}

}  // namespace lockstep

#include "system_library.hpp"

#include <dlfcn.h>
#include <lockstep/base/error.hpp>

namespace lockstep::io {
namespace {

std::string last_loading_error() {
  const char* const text = dlerror();
  return text == nullptr ? "no reason is known" : text;
}

}  // namespace

SystemLibrary::SystemLibrary(const SystemLibraryNames& names) {
  std::string tried;
  for (const auto& file : names.files) {
    // RTLD_LOCAL keeps its names apart from those of another version that the program may have.
    handle_ = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle_ != nullptr) return;
    tried += (tried.empty() ? "" : "; ") + last_loading_error();
  }
  throw Error("cannot load " + names.library + ", which is needed for " + names.needed_for + ": " + tried +
                  ". Install " + names.packages + ", or name the folder that has the file in LD_LIBRARY_PATH",
              {Error::machine});
}

void* SystemLibrary::address_of(const char* name) const {
  void* const address = dlsym(handle_, name);
  if (address == nullptr)
    throw Error("a library of the system is not what it should be: " + last_loading_error(), {Error::machine});
  return address;
}

}  // namespace lockstep::io

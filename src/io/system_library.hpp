// SystemLibrary: loads a library of the system when a program first needs it. So programs link LibTorch alone, and a
// program without that need runs where the library is not installed. The library stays loaded until the process ends.
//
// Thread-safe. Loading takes milliseconds, and function() a look-up, so keep the results.
#pragma once

#include <string>
#include <type_traits>
#include <vector>

namespace lockstep::io {

struct SystemLibraryNames {
  std::string library;             // the library's name in errors
  std::vector<std::string> files;  // the files to try; the first one that can be loaded is taken
  std::string needed_for;
  std::string packages;  // the packages to install
};

class SystemLibrary {
 public:
  // Loads the library. Throws Error that names the files tried, the user of the library, and the packages to install.
  explicit SystemLibrary(const SystemLibraryNames& names);

  // Finds a function of the library. Give the type that its header declares: function<decltype(::zError)>("zError").
  // Throws Error if the library has no function of this name.
  template <class Function>
  Function* function(const char* name) const {
    return reinterpret_cast<Function*>(address_of(name));
  }

 private:
  void* address_of(const char* name) const;

  void* handle_ = nullptr;
};

// Invariant: a static SystemLibrary serves the threads that still run while the process exits.
static_assert(std::is_trivially_destructible_v<SystemLibrary>);

}  // namespace lockstep::io

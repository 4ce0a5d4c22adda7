// SystemLibrary: a library of the system that is loaded when it is first needed. So programs link LibTorch alone, and
// one that never needs the library runs where it is not installed. It stays loaded until the process ends.
//
// Thread-safe. Loading takes milliseconds, and function() a look-up, so keep what they give.
#pragma once

#include <string>
#include <type_traits>
#include <vector>

namespace lockstep::io {

struct SystemLibraryNames {
  std::string library;             // as an error calls it
  std::vector<std::string> files;  // the first one that can be loaded is taken
  std::string needed_for;
  std::string packages;  // what to install
};

class SystemLibrary {
 public:
  // Throws Error that says which files were tried, what the library is needed for, and what to install.
  explicit SystemLibrary(const SystemLibraryNames& names);

  // A function of the library, of the type that its header declares: function<decltype(::zError)>("zError"). Throws
  // Error if the library has none of this name.
  template <class Function>
  Function* function(const char* name) const {
    return reinterpret_cast<Function*>(address_of(name));
  }

 private:
  void* address_of(const char* name) const;

  void* handle_ = nullptr;
};

// Invariant: a static one serves the threads that still run while the process exits.
static_assert(std::is_trivially_destructible_v<SystemLibrary>);

}  // namespace lockstep::io

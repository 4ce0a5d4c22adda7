// Loads and closes the plug-in twice, and trains in it each time.
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>

template <typename Function>
Function* function(void* plugin, const char* name) {
  void* const found = dlsym(plugin, name);
  if (found == nullptr) std::exit((std::puts(dlerror()), 1));
  return reinterpret_cast<Function*>(found);
}

int main(int, char** arguments) {
  for (int time = 1; time <= 2; ++time) {
    void* const plugin = dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL);
    if (plugin == nullptr) std::exit((std::puts(dlerror()), 1));
    const double slope = function<double()>(plugin, "train")();
    const bool throws = function<bool()>(plugin, "throws_an_error")();
    dlclose(plugin);
    std::printf("%.2f %s\n", slope, throws ? "error" : "none");
  }
}

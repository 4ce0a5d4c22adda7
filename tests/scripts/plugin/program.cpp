// Calls the shared library as any other.
#include <cstdio>

extern "C" double train();

int main() {
  std::printf("%.2f\n", train());
}

// Makes images that stand in for Fashion-MNIST where there is none.
//
// A class is a blurred random pattern, brighter from class to class. An image is its class's pattern, moved by up to
// three pixels, faded, mixed with another class's pattern and with noise: easy for some images and hopeless for a few,
// as in real life. Everything is integer arithmetic on std::mt19937_64, whose output the standard fixes. So all
// machines get the same bits.
#include <ATen/Functions.h>
#include <lockstep/base/error.hpp>
#include <lockstep/data/data.hpp>
#include <lockstep/trainer/train_options.hpp>

#include <algorithm>
#include <array>
#include <random>

namespace lockstep {
namespace {

constexpr int drawn_classes = 10;
constexpr int side = 28;
constexpr int cell = 4;  // the step of the grid on which a pattern is drawn; between its points values are interpolated
constexpr int max_shift = 3;

using Random = std::mt19937_64;
using Pattern = std::array<std::array<int, side>, side>;

int draw(Random& random, int low, int high) {
  return low + static_cast<int>(random() % static_cast<uint64_t>(high - low + 1));
}

Pattern draw_pattern(int label, Random& random) {
  constexpr int points = side / cell + 1;
  std::array<std::array<int, points>, points> grid{};
  for (int y = 1; y < points - 1; ++y) {
    for (int x = 1; x < points - 1; ++x) grid[y][x] = draw(random, 0, 10) <= label ? draw(random, 128, 255) : 0;
  }
  Pattern pattern{};
  for (int y = 0; y < side; ++y) {
    for (int x = 0; x < side; ++x) {
      const auto &above = grid[y / cell], &below = grid[y / cell + 1];
      int right = x % cell, left = cell - right, down = y % cell, up = cell - down;
      int column = x / cell;
      pattern[y][x] = (up * (left * above[column] + right * above[column + 1]) +
                       down * (left * below[column] + right * below[column + 1])) /
                      (cell * cell);
    }
  }
  return pattern;
}

// Gives the value at (y, x) of a pattern that is moved by (dy, dx).
struct Moved {
  const Pattern& pattern;
  int dy, dx;
  int at(int y, int x) const {
    y -= dy;
    x -= dx;
    return y < 0 || y >= side || x < 0 || x >= side ? 0 : pattern[y][x];
  }
};

Moved move_at_random(const Pattern& pattern, Random& random) {
  int dy = draw(random, -max_shift, max_shift);
  int dx = draw(random, -max_shift, max_shift);
  return {pattern, dy, dx};
}

void draw_image(uint8_t* pixels, const Moved& main, const Moved& other, Random& random) {
  int strength = draw(random, 100, 256);   // the strength of the whole image, in 256ths
  int share = draw(random, 0, 130);        // the share of the other pattern, in 256ths
  int noise_level = draw(random, 16, 96);  // the level of noise: 256ths of up to +-255
  for (int y = 0; y < side; ++y) {
    uint64_t bits = 0;
    for (int x = 0; x < side; ++x, bits >>= 8) {
      if (x % 8 == 0) bits = random();
      int noise = (2 * static_cast<int>(bits & 0xff) - 255) * noise_level / 256;
      int value = (main.at(y, x) * (256 - share) + other.at(y, x) * share) / 256 * strength / 256 + noise;
      *pixels++ = static_cast<uint8_t>(std::clamp(value, 0, 255));
    }
  }
}

Dataset draw_set(int64_t size, const std::array<Pattern, drawn_classes>& patterns, Random& random) {
  Dataset set{at::empty({size, 1, side, side}, at::kByte), at::empty({size}, at::kLong)};
  auto* pixels = set.x.mutable_data_ptr<uint8_t>();
  auto* labels = set.y.mutable_data_ptr<int64_t>();
  for (int64_t i = 0; i < size; ++i, pixels += side * side) {
    int label = draw(random, 0, drawn_classes - 1);
    int other_label = (label + draw(random, 1, drawn_classes - 1)) % drawn_classes;
    Moved main = move_at_random(patterns[label], random);
    Moved other = move_at_random(patterns[other_label], random);
    draw_image(pixels, main, other, random);
    labels[i] = label;
  }
  return set;
}

}  // namespace

ImageData synthetic_images(int64_t train_size, int64_t test_size, uint64_t seed) {
  if (train_size < 1 || test_size < 1) {
    throw Error("synthetic images: " + std::to_string(train_size) + " to train and " + std::to_string(test_size) +
                " to test; expected 1 or more of each");
  }
  Random random(seed);
  std::array<Pattern, drawn_classes> patterns;
  for (int label = 0; label < drawn_classes; ++label) patterns[label] = draw_pattern(label, random);
  Random test_random(random());  // the test set does not depend on the training set's size
  return {.train = draw_set(train_size, patterns, random),
          .test = draw_set(test_size, patterns, test_random),
          .source = "synthetic (ten random patterns with noise, seed " + std::to_string(seed) + "; not Fashion-MNIST)",
          .synthetic = true};
}

ImageData load_data(const DataSource& data) {
  if (std::holds_alternative<TextFile>(data)) throw Error("load_data: a text has no images; load_text() reads it");
  if (std::holds_alternative<SyntheticImages>(data)) return synthetic_images();
  return load_fashion_mnist(std::get<FashionMnist>(data).folder);
}

}  // namespace lockstep

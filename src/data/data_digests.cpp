#include "data_digests.hpp"

#include <cstdint>
#include <utility>
#include <vector>

#include "base/classic.hpp"
#include "io/digest.hpp"
#include "io/safetensors.hpp"

namespace lockstep {
namespace {

std::string big_endian(int64_t number) {
  std::string bytes;
  for (int shift = 24; shift >= 0; shift -= 8) bytes += static_cast<char>(number >> shift);
  return bytes;
}

std::string digest_of_idx(const at::Tensor& values, const std::vector<int64_t>& sizes) {
  constexpr int64_t uint8_values = 0x08;
  io::Digest digest;
  digest.update(big_endian(uint8_values << 8 | static_cast<int64_t>(sizes.size())));
  for (const int64_t size : sizes) digest.update(big_endian(size));
  const at::Tensor bytes = values.to(at::kByte).contiguous();
  digest.update(bytes.const_data_ptr(), bytes.nbytes());
  return digest.hex();
}

std::string digest_of_tensor(const at::Tensor& tensor) {
  io::Digest digest;
  if (!tensor.defined()) return digest.hex();
  digest.update(classic_text(tensor.scalar_type(), ' ', tensor.sizes(), '\n'));
  const at::Tensor bytes = io::as_in_a_file(tensor);
  digest.update(bytes.const_data_ptr(), bytes.nbytes());
  return digest.hex();
}

// Adds to the digest of the targets what only some samples have: further tensors, and an order of their own.
std::string with_the_rest(const std::string& targets, const Samples& samples) {
  std::string rest;
  for (const auto& [name, tensor] : samples.tensors().more) rest += name + '\n' + digest_of_tensor(tensor) + '\n';
  if (samples.has_order()) rest += "order " + samples.order_version();
  if (rest.empty()) return targets;
  return io::sha256_of(targets + '\n' + rest);
}

// Gives digests of the samples and of the targets.
std::pair<std::string, std::string> digests_of_samples(const Samples& samples) {
  if (samples.in_memory()) {
    return {digest_of_tensor(samples.tensors().x), with_the_rest(digest_of_tensor(samples.tensors().y), samples)};
  }
  const std::string both = io::sha256_of(std::to_string(samples.size()) + " samples, version " + samples.version());
  return {both, with_the_rest(both, samples)};
}

}  // namespace

DataDigests digests_of(const Samples& train, const Samples& test) {
  const auto [train_x, train_y] = digests_of_samples(train);
  const auto [test_x, test_y] = digests_of_samples(test);
  return {train_x, train_y, test_x, test_y};
}

DataDigests digests_of(const ImageData& data) {
  const auto images = [](const at::Tensor& x) { return digest_of_idx(x, {x.size(0), x.size(2), x.size(3)}); };
  const auto labels = [](const at::Tensor& y) { return digest_of_idx(y, {y.size(0)}); };
  return {images(data.train.x), labels(data.train.y), images(data.test.x), labels(data.test.y)};
}

const std::array<KnownImages, 2>& known_images() {
  static const std::array<KnownImages, 2> known = {{
      {"Fashion-MNIST",
       {.train_images = "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        .train_labels = "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        .test_images = "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        .test_labels = "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34"}},
      {"MNIST",
       {.train_images = "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        .train_labels = "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        .test_images = "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        .test_labels = "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2"}},
  }};
  return known;
}

bool is_fashion_mnist(const DataDigests& digests) {
  return digests == known_images()[0].digests;
}

bool has_images_of_mnist(const DataDigests& digests) {
  const DataDigests& mnist = known_images()[1].digests;
  return digests.train_images == mnist.train_images || digests.test_images == mnist.test_images;
}

}  // namespace lockstep

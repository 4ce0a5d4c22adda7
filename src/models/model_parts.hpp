// The models share these functions: they check options, scale sizes, and draw weights that depend on a seed alone.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/upsampling.h>
#include <lockstep/models/models.hpp>

#include <cstdint>
#include <string>

namespace lockstep {

// These functions throw Error that names the model.
void check_width(const std::string& model, double width);
void check_image_size(const std::string& model, int64_t size, int64_t least);
void check_at_least_one(const std::string& model, const std::string& what, int64_t size);
void check_dropout(const std::string& model, const std::string& what, double dropout);
void check_image_model(const std::string& model, const auto& options) {
  check_at_least_one(model, "in_channels", options.in_channels);
  check_at_least_one(model, "classes", options.classes);
  check_width(model, options.width);
}
void check_options(const AlexNetOptions& options);
void check_options(const ResNet18Options& options);
void check_options(const GptOptions& options);

// Gives the nearest multiple of 8 to count * width, at least 8.
int64_t scaled(int64_t count, double width);

// Makes a layer that resizes images to size x size, bilinearly.
torch::nn::Upsample resize(int64_t size);

// Draws Xavier's uniform distribution for parameters with two dimensions or more. Biases become zero; BatchNorm's stay.
void draw_weights(torch::nn::Module& net, uint64_t seed);

}  // namespace lockstep

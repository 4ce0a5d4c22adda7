// Turns rows of images as they are kept, in bytes, into what a network gets.
#pragma once

#include <lockstep/data/data.hpp>

namespace lockstep {

inline Dataset with_images_as_floats(Dataset rows) {
  if (rows.x.scalar_type() == at::kByte) rows.x = rows.x.to(at::kFloat).div_(255);
  return rows;
}

}  // namespace lockstep

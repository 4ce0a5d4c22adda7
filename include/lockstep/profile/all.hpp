// profile: measures what a plan needs to know.
//   layer_profile  measures a net's layers, the ranks' speeds and their links
#pragma once

#include <lockstep/profile/layer_profile.hpp>

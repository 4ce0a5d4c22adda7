// Planted bugs: copies of the library's sources have all of them (plant.cmake), and one at a time is switched on.
#pragma once

namespace lockstep::simulation {

bool planted(int bug);  // whether the bug is on
void plant(int bug);    // switches this one on, and no other; 0: none

}  // namespace lockstep::simulation

// ranks: run() and Rank, and what all ways to divide work use. Storey 2.
//   evaluate  accuracy and loss on a data set, computed on all ranks
//   rank      run() and Rank: one thread per device, and what they say to each other
//   traffic   how much a rank sends, and how long it waits
#pragma once

#include <lockstep/ranks/evaluate.hpp>
#include <lockstep/ranks/rank.hpp>
#include <lockstep/ranks/traffic.hpp>

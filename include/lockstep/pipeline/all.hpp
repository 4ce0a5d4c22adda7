// pipeline: networks split by layers.
//   pipeline  Pipeline: a network split by its layers
//
// How it works. pipeline_schedule.hpp (room layout) says in which order a rank computes its stages' forwards and
// backwards. src/pipeline/pipeline_messages.cpp derives from all ranks' orders who sends what to whom, and when. Both
// are pure functions of a few numbers. pipeline.cpp goes through the steps. It takes what a step needs from the mail
// (pipeline_mail.cpp), computes one stage (pipeline_stage.cpp), and hands on the result (docs/decisions/0009). If a
// stage computes with a parameter of an earlier one, pipeline_ties.cpp lends it to that stage (docs/decisions/0032).
#pragma once

#include <lockstep/pipeline/pipeline.hpp>

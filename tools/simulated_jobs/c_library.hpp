// The C library's own functions, beside those that c_library.cpp puts in their place for simulated threads.
#pragma once

#include <pthread.h>

#include "scheduler.hpp"

namespace lockstep::simulation::c_library {

int create(pthread_t* handle, const pthread_attr_t* attributes, void* (*function)(void*), void* argument);

void futex(int* word, int operation, int value);

void unlock_files(Process& process);  // unlocks the files of a process that has ended

}  // namespace lockstep::simulation::c_library

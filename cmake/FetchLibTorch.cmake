# lockstep_provide_torch(<ON|OFF|AUTO>) is lockstep_find_torch() that fetches the pinned LibTorch if there is none.
# A LibTorch named by Torch_DIR, Torch_ROOT or CMAKE_PREFIX_PATH is taken instead.

include(LockstepTorch)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS
  ${CMAKE_CURRENT_LIST_DIR}/libtorch-cpu.txt ${CMAKE_CURRENT_LIST_DIR}/libtorch-cuda.txt)

macro(lockstep_provide_torch cuda)
  if(LOCKSTEP_FETCHED_TORCH_DIR AND Torch_DIR STREQUAL LOCKSTEP_FETCHED_TORCH_DIR)
    unset(Torch_DIR CACHE)  # fetched by an earlier configure, not the user's choice: follow the pin
  endif()
  lockstep_find_torch("${cuda}")

  if(NOT lockstep_torch_FOUND)
    message(STATUS "LibTorch: ${lockstep_torch_WHY}; taking the pinned one")
    if("${cuda}" STREQUAL "AUTO")
      set(flavour)  # the script looks for a GPU
    elseif(${cuda})
      set(flavour cuda)
    else()
      set(flavour cpu)
    endif()
    execute_process(COMMAND ${PROJECT_SOURCE_DIR}/cmake/fetch-libtorch.sh ${flavour}
      OUTPUT_VARIABLE torch_root OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE failed)
    if(failed)
      message(FATAL_ERROR "LibTorch could not be fetched (see above). To use one of your own: -DCMAKE_PREFIX_PATH=<its folder>")
    endif()
    lockstep_find_torch("${cuda}" HINTS ${torch_root})
    if(NOT lockstep_torch_FOUND)
      message(FATAL_ERROR "LibTorch in ${torch_root}: ${lockstep_torch_WHY}")
    endif()
    set(LOCKSTEP_FETCHED_TORCH_DIR "${Torch_DIR}" CACHE INTERNAL "")
  endif()
  message(STATUS "LibTorch ${lockstep_torch_VERSION} in ${Torch_DIR}, CUDA parts: ${lockstep_torch_CUDA}")
endmacro()

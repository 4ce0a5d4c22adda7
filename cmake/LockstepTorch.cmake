# lockstep_find_torch(): finds LibTorch and defines lockstep::torch, the one target that lockstep links.
#
# PyPI's torch wheel is a CUDA build whose package file asks for a CUDA toolkit, which a machine without a GPU does not have. An empty
# torch::cudart, defined first, answers that question; torch_cpu and c10 then link alone. With CUDA on, torch_cuda is linked as well.
# Used by lockstep's own build and, installed, by find_package(lockstep).

macro(lockstep_find_torch with_cuda)
  if(NOT TARGET torch::cudart)
    add_library(torch::cudart INTERFACE IMPORTED)
  endif()
  find_package(Torch CONFIG REQUIRED)
  if(Torch_VERSION AND Torch_VERSION VERSION_LESS 2.11)
    message(FATAL_ERROR "lockstep needs LibTorch 2.11 or newer; ${Torch_DIR} has ${Torch_VERSION}.")
  endif()

  if(NOT TARGET lockstep::torch)
    add_library(lockstep::torch INTERFACE IMPORTED)
    target_link_libraries(lockstep::torch INTERFACE torch_cpu_library c10)
    # Not as SYSTEM-less -I: LibTorch's headers are not ours to warn about.
    target_include_directories(lockstep::torch SYSTEM INTERFACE ${TORCH_INCLUDE_DIRS})
    target_compile_features(lockstep::torch INTERFACE cxx_std_20)
    if(${with_cuda})
      target_link_libraries(lockstep::torch INTERFACE torch_cuda_library c10_cuda)
    endif()
  endif()
endmacro()

# lockstep_find_torch(<ON|OFF|AUTO> [HINTS dir...]) finds LibTorch 2.11 or newer and defines lockstep::torch, the one
# target that lockstep links. Leaves Torch_DIR in the cache; in the caller's scope it sets
#   lockstep_torch_FOUND     whether there is a LibTorch; if not, lockstep_torch_WHY says what was seen
#   lockstep_torch_VERSION
#   lockstep_torch_CUDA      whether lockstep::torch brings the CUDA parts: as asked, or with AUTO if all is there
# Used by lockstep's own build and, installed, by find_package(lockstep).
#
# PyPI's torch wheel is a CUDA build. Its package file asks for a CUDA toolkit with nvcc, which lockstep does not need
# (it has no .cu files) and most machines lack. An empty torch::cudart, defined first, answers that question. With CUDA
# it then gets the runtime library and the headers, from NVIDIA's wheels beside torch or from a toolkit on the machine.

include(CheckCXXSourceCompiles)

function(lockstep_find_torch cuda)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "HINTS")
  set(lockstep_torch_FOUND FALSE PARENT_SCOPE)
  set(lockstep_torch_CUDA OFF PARENT_SCOPE)

  # In a project that only finds the package they are seen where it was found, as LibTorch's own targets.
  set(seen_by_all)
  if(CMAKE_FIND_PACKAGE_TARGETS_GLOBAL)
    set(seen_by_all GLOBAL)
  endif()
  foreach(answered torch::cudart caffe2::mkl)  # with MKL it would add library folders that do not exist
    if(NOT TARGET ${answered})
      add_library(${answered} INTERFACE IMPORTED ${seen_by_all})
    endif()
  endforeach()
  # Its package file warns of static libraries (kineto) that the wheel does not hold and
  # that a shared LibTorch does not need.
  set(CMAKE_MESSAGE_LOG_LEVEL ERROR)
  find_package(Torch 2.11 CONFIG QUIET HINTS ${arg_HINTS})
  unset(CMAKE_MESSAGE_LOG_LEVEL)
  if(NOT Torch_FOUND)
    set(why "no LibTorch was found")
    foreach(config version IN ZIP_LISTS Torch_CONSIDERED_CONFIGS Torch_CONSIDERED_VERSIONS)
      string(APPEND why "; ${config} is version ${version}, and lockstep needs 2.11 or newer")
    endforeach()
    set(lockstep_torch_WHY "${why}" PARENT_SCOPE)
    return()
  endif()
  set(lockstep_torch_FOUND TRUE PARENT_SCOPE)
  set(lockstep_torch_VERSION "${Torch_VERSION}" PARENT_SCOPE)
  if(TARGET lockstep::torch)
    return()
  endif()

  add_library(lockstep::torch INTERFACE IMPORTED ${seen_by_all})  # imported: its include folders count as system headers
  target_link_libraries(lockstep::torch INTERFACE torch_cpu_library c10)
  target_include_directories(lockstep::torch INTERFACE ${TORCH_INCLUDE_DIRS})
  target_compile_features(lockstep::torch INTERFACE cxx_std_20)

  if(cuda OR cuda STREQUAL "AUTO")
    get_filename_component(torch_root "${Torch_DIR}/../../.." ABSOLUTE)
    lockstep_add_cuda("${torch_root}")
    if(NOT why_not_cuda)
      set(lockstep_torch_CUDA ON PARENT_SCOPE)
    elseif(NOT cuda STREQUAL "AUTO")
      message(FATAL_ERROR "The CUDA parts of lockstep are on, but ${why_not_cuda}.")
    endif()
  endif()
endfunction()

# Gives torch::cudart and lockstep::torch the CUDA parts, or sets why_not_cuda.
function(lockstep_add_cuda torch_root)
  if(NOT TARGET torch_cuda)
    set(why_not_cuda "the LibTorch in ${torch_root} is a build without CUDA" PARENT_SCOPE)
    return()
  endif()

  # All headers from NVIDIA's wheels or all from one toolkit: their versions do not mix.
  file(GLOB wheels "${torch_root}/../nvidia/*")
  lockstep_find_cuda_parts("${wheels}")
  foreach(toolkit "$ENV{CUDA_HOME}" "$ENV{CUDA_PATH}" /usr/local/cuda /usr)
    if(cuda_missing AND toolkit)
      lockstep_find_cuda_parts("${toolkit};/usr")
    endif()
  endforeach()
  if(cuda_missing)
    set(why_not_cuda "neither ${torch_root}/../nvidia nor a CUDA toolkit has all of what it needs (${cuda_missing})" PARENT_SCOPE)
    return()
  endif()

  # The linker succeeds only if every library that libtorch_cuda needs is there: cuBLAS, cuDNN, NCCL and the rest.
  set(CMAKE_REQUIRED_LIBRARIES -Wl,--no-as-needed
    ${torch_root}/lib/libtorch_cuda.so ${torch_root}/lib/libc10_cuda.so ${torch_root}/lib/libtorch_cpu.so ${torch_root}/lib/libc10.so)
  set(CMAKE_REQUIRED_QUIET ON)
  check_cxx_source_compiles("int main() { return 0; }" LOCKSTEP_TORCH_CUDA_LINKS)
  set(links ${LOCKSTEP_TORCH_CUDA_LINKS})
  unset(LOCKSTEP_TORCH_CUDA_LINKS CACHE)  # the next configure may see another LibTorch
  if(NOT links)
    set(why_not_cuda "libtorch_cuda in ${torch_root}/lib does not link: libraries that it needs are missing" PARENT_SCOPE)
    return()
  endif()

  target_include_directories(torch::cudart INTERFACE ${cuda_include_dirs})
  target_link_libraries(torch::cudart INTERFACE "${cuda_runtime}")
  target_link_libraries(lockstep::torch INTERFACE torch_cuda_library c10_cuda torch::cudart)
  set_property(TARGET torch_cuda PROPERTY INTERFACE_SYSTEM_INCLUDE_DIRECTORIES)  # 2.11 names a relative folder here
endfunction()

# Looks under `roots` alone for the headers that LibTorch's CUDA and NCCL headers include, and for the CUDA runtime.
# Sets cuda_include_dirs and cuda_runtime, and cuda_missing to the first thing that is not there.
function(lockstep_find_cuda_parts roots)
  set(include_dirs)
  foreach(header cuda_runtime_api.h crt/host_defines.h cublas_v2.h cusparse.h cusolverDn.h nccl.h)
    find_path(dir ${header} PATHS ${roots} PATH_SUFFIXES include NO_CACHE NO_DEFAULT_PATH)
    if(NOT dir)
      set(cuda_missing ${header} PARENT_SCOPE)
      return()
    endif()
    list(APPEND include_dirs ${dir})
    unset(dir)
  endforeach()
  find_library(runtime NAMES cudart libcudart.so.13 libcudart.so.12 PATHS ${roots} PATH_SUFFIXES lib lib64 NO_CACHE NO_DEFAULT_PATH)
  if(NOT runtime)
    set(cuda_missing libcudart PARENT_SCOPE)
    return()
  endif()
  list(REMOVE_DUPLICATES include_dirs)
  set(cuda_include_dirs ${include_dirs} PARENT_SCOPE)
  set(cuda_runtime ${runtime} PARENT_SCOPE)
  set(cuda_missing "" PARENT_SCOPE)
endfunction()

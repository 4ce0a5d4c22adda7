# lockstep_find_gloo() looks for Gloo's headers, which ranks in several processes need on the CPU. LibTorch's wheel has
# Gloo itself but not its headers; Debian's libgloo-dev has them. Nothing of it is linked. Sets lockstep_gloo_FOUND.

include(CheckCXXSourceCompiles)

# Whether this LibTorch's Gloo could encrypt what ranks send each other. Nothing uses it yet (docs/decisions/0028).
function(lockstep_look_for_tls)
  execute_process(COMMAND grep -qa TCP_TLS "${TORCH_INSTALL_PREFIX}/lib/libtorch_cpu.so" RESULT_VARIABLE result OUTPUT_QUIET ERROR_QUIET)
  if(result EQUAL 1)
    message(STATUS "Gloo: this LibTorch has no TLS transport; between machines tensors go in clear text")
  elseif(result EQUAL 0)
    message(STATUS "Gloo: this LibTorch has a TLS transport, which lockstep does not use; between machines tensors go in clear text")
  endif()
endfunction()

function(lockstep_find_gloo)
  set(lockstep_gloo_FOUND OFF PARENT_SCOPE)
  get_target_property(definitions torch_cpu INTERFACE_COMPILE_DEFINITIONS)
  if(NOT "USE_C10D_GLOO" IN_LIST definitions)
    message(STATUS "Gloo: this LibTorch was built without it; CPU ranks in several processes are off")
    return()
  endif()
  # What LibTorch's ProcessGroupGloo.hpp includes.
  set(CMAKE_REQUIRED_QUIET ON)
  check_cxx_source_compiles("
    #include <gloo/algorithm.h>
    #include <gloo/common/error.h>
    #include <gloo/context.h>
    #include <gloo/rendezvous/store.h>
    #include <gloo/transport/device.h>
    int main() { return 0; }" LOCKSTEP_GLOO_HEADERS)
  set(found ${LOCKSTEP_GLOO_HEADERS})
  unset(LOCKSTEP_GLOO_HEADERS CACHE)  # they may be installed before the next configure
  if(found)
    set(lockstep_gloo_FOUND ON PARENT_SCOPE)
    lockstep_look_for_tls()
  else()
    message(STATUS "Gloo: no headers (Debian: libgloo-dev); CPU ranks in several processes are off")
  endif()
endfunction()

# cmake --install: the library, its headers, the program with its man page and completion, and the packages that
# find_package(lockstep) and pkg-config read.

include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

list(TRANSFORM lockstep_components PREPEND lockstep_ OUTPUT_VARIABLE component_targets)
install(TARGETS lockstep ${component_targets} EXPORT lockstepTargets FILE_SET HEADERS)
install(EXPORT lockstepTargets NAMESPACE lockstep:: DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/lockstep)
if(TARGET lockstep_data)  # apart from the other components, which need no more than LibTorch
  install(TARGETS lockstep_data EXPORT lockstepDataTargets)
  install(EXPORT lockstepDataTargets NAMESPACE lockstep:: DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/lockstep)
endif()

configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/lockstepConfig.cmake.in ${PROJECT_BINARY_DIR}/lockstepConfig.cmake
  INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/lockstep NO_SET_AND_CHECK_MACRO)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/lockstepConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES
  ${PROJECT_BINARY_DIR}/lockstepConfig.cmake
  ${PROJECT_BINARY_DIR}/lockstepConfigVersion.cmake
  ${CMAKE_CURRENT_LIST_DIR}/LockstepTorch.cmake
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/lockstep)

# pkg-config's package has all components but data. A static library stands before those that it calls.
get_filename_component(torch_root "${Torch_DIR}/../../.." ABSOLUTE)
file(RELATIVE_PATH to_headers ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig ${CMAKE_INSTALL_FULL_INCLUDEDIR})
set(static_libraries -llockstep)
foreach(component IN LISTS lockstep_components)
  get_target_property(type lockstep_${component} TYPE)
  if(type STREQUAL "STATIC_LIBRARY")
    list(PREPEND static_libraries -llockstep_${component})
  endif()
endforeach()
list(JOIN static_libraries " " static_libraries)
set(torch_libraries -ltorch_cpu,-lc10)
if(lockstep_torch_CUDA)
  set(cudart $<TARGET_PROPERTY:torch::cudart,INTERFACE_LINK_LIBRARIES>)
  string(APPEND torch_libraries ",-ltorch_cuda,-lc10_cuda,${cudart},-rpath,$<PATH:GET_PARENT_PATH,${cudart}>")
endif()
configure_file(${CMAKE_CURRENT_LIST_DIR}/lockstep.pc.in ${PROJECT_BINARY_DIR}/lockstep.pc.in @ONLY)
file(GENERATE OUTPUT ${PROJECT_BINARY_DIR}/lockstep.pc INPUT ${PROJECT_BINARY_DIR}/lockstep.pc.in)
install(FILES ${PROJECT_BINARY_DIR}/lockstep.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)

# The program knows its flags. A home in its texts is the reader's.
function(lockstep_install_what_it_prints file folder)
  string(REPLACE ";" " " words "${ARGN}")
  install(CODE "execute_process(COMMAND \"${CMAKE_COMMAND}\" -E env --unset=XDG_DATA_HOME HOME=~ \"$<TARGET_FILE:lockstep_program>\" ${words}
    OUTPUT_FILE \"${PROJECT_BINARY_DIR}/${file}\" COMMAND_ERROR_IS_FATAL ANY)")
  install(FILES ${PROJECT_BINARY_DIR}/${file} DESTINATION ${folder})
endfunction()
if(TARGET lockstep_program)
  file(MAKE_DIRECTORY ${PROJECT_BINARY_DIR}/share)
  set_target_properties(lockstep_program PROPERTIES INSTALL_RPATH_USE_LINK_PATH ON)
  install(TARGETS lockstep_program)
  lockstep_install_what_it_prints(share/lockstep.1 ${CMAKE_INSTALL_MANDIR}/man1 --man-page)
  lockstep_install_what_it_prints(share/lockstep ${CMAKE_INSTALL_DATADIR}/bash-completion/completions --completion bash)
  lockstep_install_what_it_prints(share/_lockstep ${CMAKE_INSTALL_DATADIR}/zsh/site-functions --completion zsh)
  lockstep_install_what_it_prints(share/lockstep.fish ${CMAKE_INSTALL_DATADIR}/fish/vendor_completions.d --completion fish)
endif()
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE ${PROJECT_SOURCE_DIR}/CHANGELOG.md DESTINATION ${CMAKE_INSTALL_DOCDIR})

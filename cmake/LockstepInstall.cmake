# cmake --install: the library, its headers, the program, and the package that find_package(lockstep) reads.

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

if(TARGET lockstep_program)
  set_target_properties(lockstep_program PROPERTIES INSTALL_RPATH_USE_LINK_PATH ON)
  install(TARGETS lockstep_program)
endif()
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE ${PROJECT_SOURCE_DIR}/CHANGELOG.md DESTINATION ${CMAKE_INSTALL_DOCDIR})

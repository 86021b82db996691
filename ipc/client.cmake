# libdskv: the C client.  The codec and the transport are linked in and stay hidden.
add_library(dskv SHARED client.c client_call.c client_cache.c client_info.c client_forward.c client_generate.c
                        client_kv.c)
target_include_directories(dskv PUBLIC ${CMAKE_SOURCE_DIR}/include PRIVATE ${CMAKE_SOURCE_DIR})
target_link_libraries(dskv PRIVATE dskv_ipc dskv_base)
target_link_options(dskv PRIVATE LINKER:--version-script=${CMAKE_CURRENT_SOURCE_DIR}/libdskv.map LINKER:--no-undefined)
set_target_properties(dskv PROPERTIES VERSION ${PROJECT_VERSION} SOVERSION 0
                                      LINK_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/libdskv.map)

# The .pc file finds its prefix from where it lies, so that a prefix can be moved.
file(RELATIVE_PATH DSKV_PC_TO_PREFIX /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
string(REGEX REPLACE "/$" "" DSKV_PC_TO_PREFIX "${DSKV_PC_TO_PREFIX}")
configure_file(dskv.pc.in ${CMAKE_BINARY_DIR}/generated/dskv.pc @ONLY)

install(TARGETS dskv LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT client)
install(FILES ${CMAKE_BINARY_DIR}/generated/dskv.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig COMPONENT client)
install(FILES example/fork.c DESTINATION ${CMAKE_INSTALL_DOCDIR}/example COMPONENT client)

# The C client: alone against a toy server, as an installed package, and against dskvd.
dskv_c_test(ipc.client SOURCES test_client.c test_client_server.c test_client_toy.c LIBRARIES dskv dskv_ipc)
if(NOT DSKV_SANITIZE) # its programs are built as a user's are, which a sanitizer's library refuses
  dskv_py_test(ipc.client_package FILE test_client_package.py)
endif()
add_executable(test_client_e2e test_client_e2e.c)
target_link_libraries(test_client_e2e PRIVATE dskv_test_support dskv)
dskv_py_test(ipc.client_e2e FILE test_client_e2e.py RANKS 1 2 3 LABELS e2e)

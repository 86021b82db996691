# dskv-bench-exchange: times the ranks' sums, without a model.
add_executable(dskv-bench-exchange bench_exchange.c)
target_link_libraries(dskv-bench-exchange PRIVATE dskv_parallel dskv_base)
install(TARGETS dskv-bench-exchange RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})

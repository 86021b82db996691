# dskv-bench: times steps on the engine, without a daemon.
add_executable(dskv-bench bench.c bench_options.c bench_shape.c bench_machine.c bench_device.c bench_steps.c
                          bench_bed.c bench_operations.c bench_report.c)
target_link_libraries(dskv-bench PRIVATE dskv_parallel dskv_kernels dskv_base Threads::Threads m)
install(TARGETS dskv-bench RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})

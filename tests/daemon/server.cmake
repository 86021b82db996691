dskv_c_test(daemon.blocks SOURCES test_blocks.c LIBRARIES dskv_daemon)
dskv_c_test(daemon.cache SOURCES test_cache.c LIBRARIES dskv_daemon)
dskv_c_test(daemon.scheduler SOURCES test_scheduler.c LIBRARIES dskv_daemon)

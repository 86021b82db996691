dskv_c_test(daemon.config SOURCES test_config.c LIBRARIES dskv_daemon)
dskv_c_test(daemon.front SOURCES test_front.c LIBRARIES dskv_daemon)

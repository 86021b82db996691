dskv_py_test(e2e.start FILE test_start.py LABELS e2e)
dskv_py_test(e2e.signals FILE test_signals.py LABELS e2e)
dskv_py_test(e2e.replay FILE test_replay.py LABELS e2e)
set_tests_properties(e2e.signals PROPERTIES RUN_SERIAL TRUE) # it watches times
dskv_py_test(e2e.front FILE test_front.py LABELS e2e RANKS 1 2)

# The Python package: its wire behaviour against a server of a few lines, without dskvd.
dskv_py_test(ipc.python_client FILE test_python_client.py TIMEOUT 120)
dskv_py_test(ipc.python_values FILE test_python_values.py TIMEOUT 60)

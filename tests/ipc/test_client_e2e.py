"""The C client's program test_client_e2e against a running dskvd."""
import os
import subprocess

from support.daemon import BIN, Daemon


def test_c_client():
    with Daemon() as daemon:
        result = subprocess.run([BIN / "test_client_e2e"], env={**os.environ, "DSKV_ENDPOINT": daemon.endpoint},
                                capture_output=True, text=True, timeout=120)
        assert result.returncode == 0, result.stdout + result.stderr + daemon.log()

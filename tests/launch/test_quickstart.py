"""launch/quickstart --keep where somebody listens already: nothing is built, started or overwritten."""
import os
import shutil
import socket
import subprocess

import pytest
from support.daemon import SOURCE


@pytest.fixture
def taken():
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", 5560))
            listener.listen()
        except OSError:
            pass  # by somebody else, which is as good
        yield


@pytest.fixture
def tree(tmp_path):
    """As much of a source tree as that takes, with the log of a first start; its launch/setup would fail."""
    (tmp_path / "launch").mkdir()
    shutil.copy(SOURCE / "launch" / "quickstart", tmp_path / "launch")
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / "quickstart.log").write_text("the first's log")
    return tmp_path


def quickstart(tree):
    result = subprocess.run([tree / "launch" / "quickstart", "--keep"], capture_output=True, text=True, timeout=20)
    assert result.returncode == 4 and "already listens on tcp://127.0.0.1:5560" in result.stderr
    assert (tree / "build" / "quickstart.log").read_text() == "the first's log"
    return result.stderr


def test_the_daemon_of_a_first_start_is_named(taken, tree):
    first = subprocess.Popen(["sh", "-c", "read line", "launch/dskvd-run"], stdin=subprocess.PIPE)
    try:
        (tree / "build" / "quickstart.pid").write_text(f"{first.pid}\n")
        assert f"a daemon already listens on tcp://127.0.0.1:5560; stop it with:  kill {first.pid}\n" in quickstart(tree)
    finally:
        first.communicate()


def test_somebody_else_is_not(taken, tree):
    assert "something already" in quickstart(tree)
    (tree / "build" / "quickstart.pid").write_text(f"{os.getpid()}\n")
    assert "something already" in quickstart(tree)

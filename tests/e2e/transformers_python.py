"""Finds a Python that has transformers, and runs reference.py with it; without one, the test is skipped."""

import functools
import json
import os
import pathlib
import subprocess

import pytest
from support.daemon import SOURCE

NEEDS = "import torch, transformers, numpy, zmq, msgpack; torch.zeros(1).numpy()"


@functools.cache
def find():
    named = os.environ.get("DSKV_TRANSFORMERS_PYTHON")
    places = (
        [named] if named else [SOURCE / "build" / name / "bin" / "python3" for name in ("venv-transformers", "venv")]
    )
    for place in places:
        if pathlib.Path(place).exists() and subprocess.run([place, "-c", NEEDS], capture_output=True).returncode == 0:
            return str(place)
    return None


def reference(*arguments):
    """What reference.py prints, decoded."""
    python = find()
    if python is None:
        pytest.skip("no Python with transformers: run `launch/setup transformers`, or set DSKV_TRANSFORMERS_PYTHON")
    program = pathlib.Path(__file__).with_name("reference.py")
    environment = {**os.environ, "TRANSFORMERS_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [python, program, *map(str, arguments)], capture_output=True, text=True, timeout=120, env=environment
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])

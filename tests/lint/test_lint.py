"""The tree is clean, and the lint finds what it is there to find."""
import pathlib
import shutil
import subprocess

import lint
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_the_tree_is_clean():
    assert list(lint.offences(ROOT)) == []


@pytest.mark.parametrize("path, line, offence", [
    ("daemon/cache.c", '#include "kernels/ops.h"', "daemon may not include"),
    ("kernels/cpu/norm.c", '#include "parallel/model.h"', "kernels may not include"),
    ("ipc/codec.c", '#include "parallel/plan.h"', "ipc may not include"),
    ("parallel/forward.c", '#include "ipc/message.h"', "parallel may not include"),
    ("daemon/front.c", '#include "parallel/weights.h"', "not a border header"),
    ("daemon/front.c", "#include <zmq.h>", "belongs to"),
    ("parallel/engine.c", "#include <mpi.h>", "belongs to"),
    ("daemon/front.c", "#include <msgpack.h>", "belongs to"),
    ("parallel/comm_peer.c", "#include <nccl.h>", "belongs to"),
    ("parallel/comm_mpi.c", "MPI_Allreduce(a, b);", "order of summation"),
    ("parallel/comm_nccl.c", "library.ncclAllReduce(a, b);", "order of summation"),
    ("daemon/config.c", "int n = atoi(text);", "unsafe"),
])
def test_it_finds(path, line, offence):
    found = list(lint.check_source(pathlib.Path(path), line + "\n", ROOT))
    assert len(found) == 1 and offence in found[0]


@pytest.mark.skipif(not shutil.which("clang-format-14"), reason="clang-format-14 is not installed")
def test_sources_are_formatted():
    sources = [path for path in lint.tracked(ROOT) if path.suffix in {".c", ".h", ".cu", ".cuh"}]
    checked = subprocess.run(["clang-format-14", "--dry-run", "-Werror", *sources], cwd=ROOT, capture_output=True, text=True)
    offenders = {line.split(":")[0] for line in checked.stderr.splitlines() if "-Wclang-format-violations" in line}
    assert not offenders, f"run: clang-format-14 -i {' '.join(sorted(offenders))}"


def test_text_in_strings_is_not_code():
    assert list(lint.check_source(pathlib.Path("daemon/config.c"), 'puts("system(1)");\n', ROOT)) == []

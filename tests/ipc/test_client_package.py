"""libdskv as others get it: what it exports, its header in C and C++, the example built from an installed package."""
import os
import pathlib
import re
import shlex
import subprocess

import pytest
from support.daemon import BIN, SOURCE, Daemon

BUILD = BIN.parent
LIBRARY = pathlib.Path(os.environ.get("DSKV_LIB", BUILD / "lib")) / "libdskv.so.0"


def run(*command, **more):
    result = subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=120, **more)
    assert result.returncode == 0, f"{command}\n{result.stdout}{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """An installed prefix, with the environment that pkg-config and the loader need."""
    prefix = tmp_path_factory.mktemp("prefix")
    run("cmake", "--install", BUILD, "--component", "client", "--prefix", prefix)
    pc = next(prefix.rglob("dskv.pc"))
    environment = {**os.environ, "PKG_CONFIG_PATH": str(pc.parent), "LD_LIBRARY_PATH": str(pc.parent.parent)}
    return prefix, environment


def flags(environment, *options):
    return shlex.split(run("pkg-config", *options, "dskv", env=environment))


def test_exports_what_the_headers_declare_and_no_more():
    text = "".join((SOURCE / "include" / "dskv" / name).read_text() for name in ("client.h", "error.h"))
    declared = set(re.findall(r"^DSKV_API [^;]*?\b(dskv_\w+)\(", text, re.M))
    lines = [line.split() for line in run("nm", "-D", "--defined-only", LIBRARY).splitlines()]
    exported = {name.split("@")[0] for _, kind, name in lines if kind != "A"}
    assert exported == declared
    assert len(declared) > 30


def test_needs_no_mpi():
    assert "libmpi" not in run("ldd", LIBRARY)


def test_has_the_soname_of_version_0():
    assert "[libdskv.so.0]" in run("readelf", "-d", LIBRARY)


@pytest.mark.parametrize("compiler, standard, suffix", [("cc", "c11", "c"), ("c++", "c++17", "cpp")])
def test_header_compiles_and_links(package, tmp_path, compiler, standard, suffix):
    _, environment = package
    source = tmp_path / f"probe.{suffix}"
    nothing = "{}" if suffix == "cpp" else "{0}"
    source.write_text('#include <dskv/client.h>\n#include <stdio.h>\n'
                      f'int main(void)\n{{\n    struct dskv_forward_options options = {nothing};\n'
                      '    options.size = sizeof options;\n'
                      '    puts(dskv_code_name(DSKV_CUT_PAST_END));\n    return options.n_tokens != 0;\n}\n')
    program = tmp_path / "probe"
    run(compiler, f"-std={standard}", "-Wall", "-Wextra", "-Wpedantic", "-Werror", source, "-o", program,
        *flags(environment, "--cflags", "--libs"), env=environment)
    assert run(program, env=environment) == "cut_past_end\n"


def test_example_runs_against_a_daemon(package, tmp_path):
    prefix, environment = package
    source, program = next(prefix.rglob("fork.c")), tmp_path / "fork"
    run("cc", "-std=c11", "-Wall", "-Wextra", "-Werror", source, "-o", program,
        *flags(environment, "--cflags", "--libs"), env=environment)
    with Daemon(ranks=2) as daemon:
        lines = run(program, daemon.endpoint, env=environment).splitlines()
    assert [line.split(", then")[0] for line in lines[:4]] == [
        "prompt: 9 tokens (0 cached, 9 computed)",
        "fork a: 11 tokens (9 cached, 2 computed)",
        "fork b: 11 tokens (9 cached, 2 computed)",
        "cut: 5 tokens (4 cached, 1 computed)",
    ]
    assert lines[4].startswith("refused: cut_past_end: ")
    assert lines[5].startswith("generated (") and len(lines) == 6


def test_example_without_a_daemon_says_why(package, tmp_path):
    prefix, environment = package
    program = tmp_path / "fork"
    run("cc", next(prefix.rglob("fork.c")), "-o", program, *flags(environment, "--cflags", "--libs"), env=environment)
    result = subprocess.run([program, "ipc:///tmp/dskv-nobody-is-here"], env=environment, capture_output=True,
                            text=True, timeout=60)
    assert result.returncode == 1
    assert result.stderr.startswith("connect: unreachable: ") and result.stderr.count("\n") == 1

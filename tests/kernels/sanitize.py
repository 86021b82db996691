#!/usr/bin/env python3
"""Runs the tests of the CUDA kernels under compute-sanitizer, one by one and several at a time, on a machine with a GPU.

    tests/kernels/sanitize.py build/release/bin/test_kernels_cuda

Prints a line for each test and tool; keeps what the tool said where it is not clean.  Exit code: how many are not.
Tests of many cases take every n-th (--every); racecheck watches our kernels and not cuBLASLt's.  Under it a barrier of a
cluster of 8 blocks takes half a second, so that the draws' tests take minutes.
racecheck of compute-sanitizer 2025.3 (CUDA 13.0) ends with an internal error of its own in some of the matmul's tests;
that of 2026.4 does not.
"""
import argparse
import concurrent.futures
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (.*)")
CLEAN = re.compile(r"0 (errors|hazards)")


def run(options, tool, name):
    """The verdict, and everything that was printed."""
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "1"]
    if tool == "racecheck":
        command += ["--kernel-name", "kernel_substring=_kernel"]  # as ours are called
    process = subprocess.Popen(
        command + [options.program, "cuda", name],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=dict(os.environ, DSKV_TEST_EVERY=str(options.every)),
    )
    try:
        output, _ = process.communicate(timeout=options.limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the program, too
        return f"not done in {options.limit} s", process.communicate()[0]
    found = SUMMARY.search(output)
    if process.returncode == 0 and found and CLEAN.match(found[1]):
        return "clean", output
    return f"exit code {process.returncode}: {found[1] if found else 'no summary'}", output


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program", help="test_kernels_cuda")
    parser.add_argument("--tools", nargs="+", default=["memcheck", "racecheck"])
    parser.add_argument("--part", default="", help="only tests whose names have it in them")
    parser.add_argument("--jobs", type=int, default=4, help="at a time")
    parser.add_argument("--every", type=int, default=11, help="of a test's cases, 1: all")
    parser.add_argument("--limit", type=int, default=1800, help="seconds for each")
    parser.add_argument("--logs", type=pathlib.Path, default=pathlib.Path("build/sanitize"), help="where logs go")
    options = parser.parse_args()
    listed = subprocess.run([options.program, "--list"], stdout=subprocess.PIPE, text=True, check=True).stdout
    names = [name for name in listed.splitlines() if options.part in name]
    if not names:
        parser.error(f'no test has "{options.part}" in its name')
    unclean = 0
    begin = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        runs = {pool.submit(run, options, tool, name): (tool, name) for tool in options.tools for name in names}
        for future in concurrent.futures.as_completed(runs):
            tool, name = runs[future]
            verdict, output = future.result()
            print(f"{time.monotonic() - begin:6.0f} s  {tool:10} {name}: {verdict}", flush=True)
            if verdict != "clean":
                unclean += 1
                options.logs.mkdir(parents=True, exist_ok=True)
                (options.logs / f"{tool}-{re.sub('[^a-z0-9]+', '-', name.lower())}.log").write_text(output)
    print(f"{len(runs) - unclean} of {len(runs)} clean" + (f", logs in {options.logs}" if unclean else ""))
    return min(unclean, 100)


if __name__ == "__main__":
    sys.exit(main())

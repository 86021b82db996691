"""The house rules that a program can check: who may include whom, which file owns a foreign library, calls that are banned.

    lint.py [ROOT]      prints one line per offence; exit 1 when there is one
"""
import pathlib
import re
import subprocess
import sys

# Includes go downwards only.  A folder may include its own headers, include/base, and these borders.
MAY_INCLUDE = {
    "kernels": {"base", "kernels"},
    "ipc": {"base", "ipc", "dskv"},
    "parallel": {"base", "parallel", "kernels"},
    "daemon": {"base", "daemon", "ipc", "parallel"},
    "launch": {"base", "launch", "parallel", "kernels", "ipc", "dskv", "daemon"},
    "include/base": {"base", "dskv"},
    "include/dskv": {"dskv"},
    "include/kernels": {"base", "kernels"},
    "include/ipc": {"base", "ipc", "dskv"},
    "include/parallel": {"base", "parallel", "kernels"},
}
# One foreign library, one place.
OWNERS = {
    r"zmq\.h": {"ipc/transport.c", "ipc/link.c"},
    r"msgpack.*\.h": {"ipc/codec_read.c", "ipc/codec_write.c"},
    r"mpi\.h": {"parallel/start.c"},
    r"jansson\.h": {"parallel/json.c"},
    r"immintrin\.h": {"kernels/cpu/vector.h"},
    r"cuda_.*\.h": {"kernels/cuda/cuda.h", "kernels/cuda/common.cuh", "kernels/cuda/mma.cuh"},
    r"cublas.*\.h": {"kernels/cuda/matmul_lt.c"},
    r"nccl\.h": {"parallel/nccl_library.h"},
    r"nccl_device\.h": {"parallel/nccl_window.cu"},
    r"xxhash\.h": {"parallel/fingerprint.c", "parallel/numerics.c", "parallel/plan.c", "parallel/steps.c"},
}
BANNED = {
    r"\b(strcpy|strcat|sprintf|vsprintf|gets|atoi|atol|atof|strtok|system|popen|alloca)\s*\(": "unsafe or unchecked",
    r"\bMPI_(All)?[Rr]educe\w*\s*\(": "its order of summation depends on the message's size",
    r"\bncclAllReduce\s*\(": "its order of summation depends on the message's size",
    r"\b(TODO|FIXME|XXX|HACK)\b": "finish it",
}
# What may call one of these all the same: measurements against it, whose result nobody computes with.
MEASURED = {("parallel/nccl_link.c", "ncclAllReduce(")}
TOP_LEVEL = {"launch", "ipc", "daemon", "parallel", "kernels", "include", "tests", "CMakeLists.txt", "README.md", ".ci",
             "CMakePresets.json", ".clang-format", ".clang-tidy", ".gitignore", "LICENSE"}
MAX_LINES = 600


def folder_of(path):
    parts = path.parts
    return "/".join(parts[:2]) if parts[0] == "include" else parts[0]


def target_of(path, name, root):
    """The border that an include names: its first folder, or the including file's own folder for a private header."""
    if (root / path.parent / name).exists() and "/" not in name:
        return folder_of(path).split("/")[-1]
    return name.split("/")[0]


def check_source(path, text, root):
    folder = folder_of(path)
    for number, line in enumerate(text.splitlines(), 1):
        where = f"{path}:{number}"
        include = re.match(r'\s*#\s*include\s*(["<])([^">]+)[">]', line)
        if include:
            name = include.group(2)
            if include.group(1) == '"' and folder in MAY_INCLUDE:
                target = target_of(path, name, root)
                device_header = folder == "kernels" and target in {"cpu", "cuda"}
                if target not in MAY_INCLUDE[folder] and not device_header:
                    yield f"{where}: {folder} may not include {name}"
                elif target in {"daemon", "ipc", "parallel", "kernels"} and target != folder.split("/")[-1] \
                        and not (root / "include" / name).exists():
                    yield f"{where}: {name} is not a border header"
            for pattern, owners in OWNERS.items():
                if re.fullmatch(pattern, name.split("/")[-1] if "msgpack" not in name else name) and str(path) not in owners:
                    yield f"{where}: {name} belongs to {', '.join(sorted(owners))}"
        code = line if path.suffix == ".py" else re.sub(r'"(\\.|[^"\\])*"', '""', line)
        for pattern, reason in BANNED.items():
            found = re.search(pattern, code)
            if found and (str(path), found.group(0).strip()) not in MEASURED:
                yield f"{where}: {found.group(0).strip()}: {reason}"


def tracked(root):
    listed = subprocess.run(["git", "-C", root, "ls-files"], capture_output=True, text=True)
    if listed.returncode == 0 and listed.stdout:
        return [pathlib.Path(line) for line in listed.stdout.splitlines() if (root / line).exists()]
    skip = {"build", ".git", "__pycache__", ".pytest_cache"}
    return [path.relative_to(root) for path in root.rglob("*")
            if path.is_file() and not skip & set(path.relative_to(root).parts)]


def offences(root):
    for path in tracked(root):
        if path.parts[0] not in TOP_LEVEL:
            yield f"{path}: not a room of this house"
        if path.suffix in {".c", ".h", ".cu", ".cuh", ".py"} and path.parts[0] != "tests":
            text = (root / path).read_text(encoding="utf-8")
            yield from check_source(path, text, root)
            if len(text.splitlines()) > MAX_LINES:
                yield f"{path}: {len(text.splitlines())} lines: is it still about one thing?"


if __name__ == "__main__":
    project = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else pathlib.Path(__file__).parents[2]
    found = list(offences(project.resolve()))
    print("\n".join(found) or "lint: clean")
    sys.exit(bool(found))

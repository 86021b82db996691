"""A dskvd for tests: starts it on a private endpoint, waits until it is ready, and leaves nothing behind.

    with Daemon(ranks=2, options=["--block-tokens", "16"]) as daemon:
        client = dskv.connect(daemon.endpoint)

`run(...)` is for starts that end by themselves: wrong options, --check, --replay.
"""
import os
import pathlib
import shutil
import signal
import subprocess
import tempfile
import time
import uuid

SOURCE = pathlib.Path(__file__).resolve().parents[2]
MODELS = SOURCE / "launch" / "models"
BIN = pathlib.Path(os.environ.get("DSKV_BIN", SOURCE / "build" / "release" / "bin"))
DSKVD = BIN / "dskvd"
MARK = "DSKV_TEST_DAEMON"  # in the environment of every process of one daemon, whoever its parent is
READY = "dskvd: ready on "


def default_ranks():
    return int(os.environ.get("DSKV_TEST_RANKS", 1))


def environment_options():
    """What DSKV_TEST_OPTIONS gives to every daemon: "--device cuda --share-gpu" runs the tests on a GPU."""
    return os.environ.get("DSKV_TEST_OPTIONS", "").split()


def model_directory(model):
    """The bundled model of this name, or a directory."""
    return str(MODELS / model) if (MODELS / str(model)).is_dir() else str(model)


def marked_pids(mark, program=None):
    """Processes that carry the mark; with a program's name, only its own, in the order of their ranks."""
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            environment = (entry / "environ").read_bytes().split(b"\0")
            name = (entry / "comm").read_text().strip()
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:  # it has ended, or is another user's
            continue
        if f"{MARK}={mark}".encode() not in environment or state in "ZX" or (program and name != program):
            continue
        ranks = [v.partition(b"=")[2] for v in environment if v.startswith(b"OMPI_COMM_WORLD_RANK=")]
        found.append((int(ranks[0]) if ranks else 0, int(entry.name)))
    return [pid for _, pid in sorted(found)]


def kill_marked(mark):
    for _ in range(50):
        pids = marked_pids(mark)
        if not pids:
            return
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        time.sleep(0.02)
    raise RuntimeError(f"processes outlive SIGKILL: {pids}")


class Place:
    """A temporary directory, the mark, and the command line and environment that keep a daemon inside them."""

    def __init__(self):
        self.directory = tempfile.mkdtemp(prefix="dskv-", dir="/tmp")  # short: a socket's path has 107 characters
        self.mark = uuid.uuid4().hex
        self.sessions = os.path.join(self.directory, "mpi")
        os.mkdir(self.sessions)

    def environment(self, extra=None):
        return {**os.environ, "TMPDIR": self.sessions, MARK: self.mark, "ASAN_OPTIONS": "detect_leaks=0", **(extra or {})}

    def command(self, ranks, arguments, with_mpirun=None):
        end_with_us = ["/usr/bin/setpriv", "--pdeathsig", "TERM"]  # also when a test is killed
        if not (ranks > 1 if with_mpirun is None else with_mpirun):
            return [*end_with_us, str(DSKVD), *arguments]
        return [*end_with_us, "mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none",
                "--mca", "orte_tmpdir_base", self.sessions, "--mca", "btl_vader_backing_directory", self.sessions,
                "-np", str(ranks), str(DSKVD), *arguments]

    def close(self):
        kill_marked(self.mark)
        shutil.rmtree(self.directory, ignore_errors=True)


def run(arguments, ranks=1, timeout=60, with_mpirun=None, env=None, stdout=subprocess.PIPE):
    """dskvd with these arguments until it ends: a CompletedProcess with stdout, unless it goes elsewhere, and stderr as text."""
    place = Place()
    try:
        return subprocess.run(place.command(ranks, [str(a) for a in arguments], with_mpirun), timeout=timeout, text=True,
                              stdin=subprocess.DEVNULL, stdout=stdout, stderr=subprocess.PIPE,
                              env=place.environment(env), start_new_session=True)
    finally:
        place.close()


def replay(model, path, *options, **how):
    """What run gives for the model on the plans of this file, with the environment's options before these."""
    return run(["--model", model_directory(model), "--replay", path, *environment_options(), *options], **how)


class Daemon:
    """One dskvd; a context manager. The default number of ranks is the environment's DSKV_TEST_RANKS, else 1; one rank is
    started without mpirun unless with_mpirun says otherwise. The environment's options come before its own."""

    def __init__(self, model="atlas-gpt2", ranks=None, options=(), with_mpirun=None, env=None, listen=None, ready_timeout=60):
        self.model = model_directory(model)
        self.ranks = default_ranks() if ranks is None else ranks
        self.options = environment_options() + [str(option) for option in options]
        self.with_mpirun, self.env, self.listen, self.ready_timeout = with_mpirun, env, listen, ready_timeout
        self.endpoint = self.process = self.place = None

    def __enter__(self):
        self.place = Place()
        listen = self.listen or f"ipc://{self.place.directory}/dskvd"
        arguments = ["--model", self.model, "--listen", listen, *self.options]
        self._log_path = os.path.join(self.place.directory, "log")
        try:
            with open(self._log_path, "wb") as log:
                self.process = subprocess.Popen(self.place.command(self.ranks, arguments, self.with_mpirun), stdout=log,
                                                stderr=log, stdin=subprocess.DEVNULL, start_new_session=True,
                                                env=self.place.environment(self.env))
            self._wait_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        # Draining is the quickest end of an idle daemon: after SIGTERM mpirun sleeps before it looks again.
        for with_signal, patience in ((signal.SIGUSR1, 1), (signal.SIGTERM, 4), (signal.SIGKILL, 10)):
            if self.process and self.process.poll() is None:
                try:
                    self.stop(with_signal, patience)
                except subprocess.TimeoutExpired:
                    continue
        self._last_log = self.log()
        self.place.close()

    def _wait_ready(self):
        end = time.monotonic() + self.ready_timeout
        while time.monotonic() < end:
            ready = [line for line in self.log().splitlines() if line.startswith(READY)]
            if ready:
                self.endpoint = ready[0][len(READY):].split(" (")[0].split(", ")[0]
                return
            if self.process.poll() is not None:
                raise RuntimeError(f"dskvd ended with {self.process.returncode} before it was ready:\n{self.log()}")
            time.sleep(0.02)
        raise RuntimeError(f"dskvd was not ready after {self.ready_timeout} s:\n{self.log()}")

    def log(self):
        """All that the daemon (and mpirun) printed so far."""
        try:
            return pathlib.Path(self._log_path).read_text(errors="replace")
        except FileNotFoundError:
            return self._last_log

    def rank_pids(self):
        """The ranks' process ids, by rank; those that have ended are not in it."""
        return marked_pids(self.place.mark, "dskvd")

    def all_pids(self):
        """Every process of this daemon that is still there, mpirun included."""
        return marked_pids(self.place.mark)

    def shared_files(self):
        """Files in /dev/shm and /tmp that the ranks have mapped or open, by name; not the program and not the log."""
        names = set()
        for pid in self.rank_pids():
            lines = pathlib.Path(f"/proc/{pid}/maps").read_text().splitlines()
            paths = [line.partition("/")[1] + line.partition("/")[2] for line in lines if "/" in line]
            for fd in pathlib.Path(f"/proc/{pid}/fd").iterdir():
                try:
                    paths.append(os.readlink(fd))
                except OSError:
                    continue
            names |= {path for path in paths if path.startswith(("/dev/shm/", "/tmp/")) and os.path.exists(path)}
        return names - {self._log_path, os.path.realpath(DSKVD)}

    def stop(self, with_signal=signal.SIGTERM, timeout=40):
        """Sends a signal (to mpirun, where there is one) and returns the exit code."""
        self.process.send_signal(with_signal)
        return self.process.wait(timeout)

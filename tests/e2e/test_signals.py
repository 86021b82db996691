"""The end of a daemon: draining, signals, lost ranks; and what it costs to be idle."""
import os
import pathlib
import shutil
import signal
import subprocess
import threading
import time

import pytest

import dskv
from support.daemon import DSKVD, MODELS, SOURCE, Daemon, Place, environment_options, marked_pids

PROMPT = [352, 303, 275, 1646, 26]


def gone(daemon, within):
    """True when every process of the daemon has ended."""
    end = time.monotonic() + within
    while daemon.all_pids() and time.monotonic() < end:
        time.sleep(0.02)
    return not daemon.all_pids()


class InBackground(threading.Thread):
    """A call of a client in a thread: its result or its error."""

    def __init__(self, call):
        super().__init__(daemon=True)
        self.call, self.result, self.error = call, None, None
        self.start()

    def run(self):
        try:
            self.result = self.call()
        except dskv.Error as error:
            self.error = error


def long_generate(endpoint):
    client = dskv.connect(endpoint)
    return InBackground(lambda: client.generate(PROMPT, max_tokens=600, ignore_eos=True))


def endless_generate(endpoint):
    """Generates again and again, so that there is work whenever the end comes."""
    client = dskv.connect(endpoint)

    def go_on():
        while True:
            client.generate(PROMPT, max_tokens=1000, ignore_eos=True)

    return InBackground(go_on)


def wait_busy(client):
    end = time.monotonic() + 10
    while client.stats()["sequences_active"] == 0:
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.mark.parametrize("ranks", [1, 2])
def test_drain_finishes_what_runs(ranks):
    with Daemon(ranks=ranks) as daemon:
        with dskv.connect(daemon.endpoint) as client:
            running = long_generate(daemon.endpoint)
            wait_busy(client)
            daemon.process.send_signal(signal.SIGUSR1)
            end = time.monotonic() + 5
            while True:  # the signal takes its way through mpirun
                try:
                    client.forward(PROMPT)
                except dskv.Error as error:
                    assert error.code in ("draining", "unreachable", "timeout")
                    break
                assert time.monotonic() < end
            running.join(30)
            assert running.error is None and len(running.result.tokens) == 600
        assert daemon.process.wait(5) == 0
        assert gone(daemon, 1)


@pytest.mark.parametrize("ranks", [1, 2])
def test_drain_of_an_idle_daemon(ranks):
    with Daemon(ranks=ranks) as daemon:
        assert daemon.stop(signal.SIGUSR1, timeout=5) == 0
        assert gone(daemon, 1)


@pytest.mark.parametrize("ranks, which", [(1, signal.SIGTERM), (1, signal.SIGINT), (2, signal.SIGINT), (4, signal.SIGTERM)])
def test_end_within_three_seconds(ranks, which):
    with Daemon(ranks=ranks) as daemon:
        with dskv.connect(daemon.endpoint) as client:
            running = endless_generate(daemon.endpoint)
            wait_busy(client)
            shared = daemon.shared_files()
            begin = time.monotonic()
            code = daemon.stop(which, timeout=10)
            assert time.monotonic() - begin < 3
            assert code == (0 if ranks == 1 else 1)  # mpirun's own code for a job that it was told to end
            running.join(5)
            assert running.error is not None and running.error.code in ("draining", "unreachable")
        assert gone(daemon, 1)
        shared.add(daemon.endpoint.removeprefix("ipc://"))
        assert not [name for name in shared if os.path.exists(name)]


@pytest.mark.parametrize("times, least, most", [(1, 1.5, 3), (2, 0, 1)])
def test_end_does_not_wait_for_a_stuck_rank(times, least, most):
    """Rank 1 stands still: one interrupt ends rank 0 within three seconds, a second one at once."""
    with Daemon(ranks=2) as daemon:
        pids = daemon.rank_pids()
        os.kill(pids[1], signal.SIGSTOP)
        begin = time.monotonic()
        for _ in range(times):
            os.kill(pids[0], signal.SIGINT)
            time.sleep(0.3)
        while pids[0] in daemon.rank_pids():
            time.sleep(0.02)
        assert least < time.monotonic() - begin < most
        assert daemon.process.wait(5) == 130


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("busy", [False, True])
def test_killed_rank_ends_the_job(victim, busy):
    with Daemon(ranks=2) as daemon:
        with dskv.connect(daemon.endpoint, timeout=2.0) as client:
            client.ping()
            if busy:
                running = endless_generate(daemon.endpoint)
                wait_busy(client)
            shared = daemon.shared_files()
            if victim == 1:  # rank 0 ends in order and takes its socket along
                shared.add(daemon.endpoint.removeprefix("ipc://"))
            os.kill(daemon.rank_pids()[victim], signal.SIGKILL)
            assert daemon.process.wait(5) != 0
            assert gone(daemon, 1)
            if busy:
                running.join(10)
                assert running.error is not None
            with pytest.raises(dskv.Error):
                client.ping(timeout=1.0)
        assert not [name for name in shared if os.path.exists(name)]
        if victim == 1:
            assert "dskvd: rank 1" in daemon.log()


def lost_ranks(log):
    """The ranks that the log calls gone, in its order."""
    return [int(line.split()[2]) for line in log.splitlines() if line.startswith("dskvd: ") and " is gone" in line]


@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("busy", [False, True])
def test_the_lost_rank_is_named(victim, busy):
    """That one and no other, once."""
    with Daemon(ranks=3) as daemon:
        with dskv.connect(daemon.endpoint, timeout=2.0) as client:
            if busy:
                endless_generate(daemon.endpoint)
                wait_busy(client)
            pid = daemon.rank_pids()[victim]
            os.kill(pid, signal.SIGKILL)
            assert daemon.process.wait(5) == 128 + signal.SIGKILL
        assert lost_ranks(daemon.log()) == [victim]
        assert f"its process {pid} " in daemon.log()


@pytest.mark.parametrize("busy", [False, True])
def test_no_rank_leaves_before_rank_0_names_the_lost_one(busy):
    """Neither mpirun nor rank 0 gets to look for a while: nobody else makes an end meanwhile."""
    with Daemon(ranks=3) as daemon:
        with dskv.connect(daemon.endpoint) as client:
            if busy:
                endless_generate(daemon.endpoint)
                wait_busy(client)
            pids = daemon.rank_pids()
            for pid in (daemon.process.pid, pids[0]):
                os.kill(pid, signal.SIGSTOP)
            os.kill(pids[2], signal.SIGKILL)
            time.sleep(2.5)
            assert daemon.rank_pids() == pids[:2]
            os.kill(pids[0], signal.SIGCONT)
            end = time.monotonic() + 5
            while pids[0] in daemon.rank_pids():  # it has said it then, and mpirun passes it on
                assert time.monotonic() < end
                time.sleep(0.02)
            os.kill(daemon.process.pid, signal.SIGCONT)
            assert daemon.process.wait(5) != 0
        assert lost_ranks(daemon.log()) == [2]


def test_a_rank_that_is_lost_in_a_replay_is_named(tmp_path):
    with Daemon(ranks=2, options=["--trace-plans", tmp_path / "plans"]) as daemon:
        with dskv.connect(daemon.endpoint) as client:
            client.generate(PROMPT, max_tokens=1000, ignore_eos=True)
    place = Place()
    try:
        command = place.command(2, [*environment_options(), "--model", str(MODELS / "atlas-gpt2"), "--replay",
                                    str(tmp_path / "plans")])
        process = subprocess.Popen(command, env=place.environment(), start_new_session=True, text=True,
                                   stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        process.stdout.readline()
        os.kill(marked_pids(place.mark, "dskvd")[1], signal.SIGKILL)
        said, _ = process.communicate(timeout=10)
        assert lost_ranks(said) == [1]
    finally:
        place.close()


@pytest.mark.parametrize("ranks", [1, 3])
def test_an_end_by_signal_is_no_loss(ranks):
    with Daemon(ranks=ranks) as daemon:
        daemon.stop(signal.SIGTERM, timeout=5)
        assert not lost_ranks(daemon.log())


def test_killed_mpirun_ends_the_ranks():
    with Daemon(ranks=2) as daemon:
        daemon.process.kill()
        daemon.process.wait()
        assert gone(daemon, 5)


def test_killed_rank_during_the_start():
    place = Place()
    try:
        command = place.command(3, ["--model", MODELS / "atlas-gpt2", "--listen", f"ipc://{place.directory}/d"])
        process = subprocess.Popen(command, env=place.environment(), start_new_session=True, stdout=subprocess.DEVNULL,
                                   stderr=subprocess.DEVNULL)
        while len(pids := marked_pids(place.mark, "dskvd")) < 3:
            time.sleep(0.001)
        os.kill(pids[2], signal.SIGKILL)
        assert process.wait(5) != 0
        assert not marked_pids(place.mark, "dskvd")
    finally:
        place.close()


def cpu_seconds(pid):
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def gpus_at_work():
    """Percent of the last moments in which each GPU had a kernel; empty where there is none to ask."""
    if not shutil.which("nvidia-smi"):
        return []
    asked = subprocess.run(["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"],
                           capture_output=True, text=True, timeout=30)
    return [int(line) for line in asked.stdout.split() if line.isdigit()]


def test_idle_ranks_cost_nothing():
    """No rank spins, and a GPU that they use is at rest."""
    others = any(gpus_at_work())
    with Daemon(ranks=2) as daemon:
        with dskv.connect(daemon.endpoint) as client:
            client.forward(PROMPT)
            client.generate(PROMPT, max_tokens=5, ignore_eos=True)
            is_on_gpu = client.info().device.startswith("cuda")
            time.sleep(2 if is_on_gpu else 0.5)
            pids, seconds = daemon.rank_pids(), 5.0
            before = [cpu_seconds(pid) for pid in pids]
            time.sleep(seconds)
            shares = [(cpu_seconds(pid) - then) / seconds for pid, then in zip(pids, before)]
            if is_on_gpu and not others:  # of others it says nothing
                at_work = [gpus_at_work() for _ in range(5)]
                assert at_work[0] and not any(map(any, at_work)), at_work
        assert len(pids) == 2 and max(shares) < 0.02, shares


# ---- launch/dskvd-run ---------------------------------------------------------------------------------------------------


class Launcher:
    """launch/dskvd-run, from a folder where it finds the dskvd under test beside itself."""

    def __init__(self, directory):
        os.symlink(DSKVD, directory / "dskvd")
        self.script = directory / "dskvd-run"
        self.script.write_bytes((SOURCE / "launch" / "dskvd-run").read_bytes())
        self.script.chmod(0o755)
        self.place = Place()

    def start(self, *arguments):
        return subprocess.Popen([self.script, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                text=True, start_new_session=True, env=self.place.environment())


@pytest.fixture
def launcher(tmp_path):
    launcher = Launcher(tmp_path)
    yield launcher
    launcher.place.close()


@pytest.mark.parametrize("which", [signal.SIGUSR1, signal.SIGTERM, signal.SIGINT])
def test_dskvd_run_passes_signals_on(launcher, which):
    process = launcher.start("-np", 2, "--model", MODELS / "atlas-gpt2", "--listen", f"ipc://{launcher.place.directory}/d")
    for line in process.stdout:
        if line.startswith("dskvd: ready on"):
            break
    begin = time.monotonic()
    process.send_signal(which)
    assert process.wait(10) == 0
    assert time.monotonic() - begin < 3
    assert not marked_pids(launcher.place.mark)
    assert not os.listdir(launcher.place.sessions)


@pytest.mark.parametrize("which", [signal.SIGUSR1, signal.SIGTERM])
@pytest.mark.parametrize("after", [0.02, 0.05, 0.1])
def test_dskvd_run_is_ended_while_it_starts(launcher, which, after):
    process = launcher.start("-np", 2, "--model", MODELS / "atlas-gpt2", "--listen", f"ipc://{launcher.place.directory}/d")
    time.sleep(after)
    process.send_signal(which)
    said, _ = process.communicate(timeout=10)
    # 128 + which, -which: before it had begun, or its shell had
    if "dskvd-run: " in said or process.returncode not in (0, 128 + which, -which):
        pytest.fail(f"{process.returncode}: {said}")
    assert not marked_pids(launcher.place.mark)


def test_the_unit_drains_when_it_is_stopped(launcher):
    """As systemd does it: the unit's signal to the main process alone; what runs is finished."""
    unit = dict(line.split("=", 1) for line in (SOURCE / "launch" / "dskvd.service").read_text().splitlines()
                if "=" in line and not line.startswith("#"))
    program, *arguments = unit["ExecStart"].split()
    assert program.endswith("/dskvd-run") and unit["KillMode"] == "mixed" and int(unit["TimeoutStopSec"]) > 30
    endpoint = f"ipc://{launcher.place.directory}/d"
    process = launcher.start(*arguments[:-1], MODELS / "atlas-gpt2", "--listen", endpoint)
    for line in process.stdout:
        if line.startswith("dskvd: ready on"):
            break
    with dskv.connect(endpoint) as client:
        running = long_generate(endpoint)
        wait_busy(client)
        process.send_signal(signal.Signals[unit["KillSignal"]])
        running.join(30)
        assert running.error is None and len(running.result.tokens) == 600
    assert process.wait(5) == 0
    assert not marked_pids(launcher.place.mark)


def test_dskvd_run_gives_the_exit_code(launcher):
    process = launcher.start("-np", 2, "--model", "/nowhere", "--listen", f"ipc://{launcher.place.directory}/d")
    assert process.wait(20) == 3
    assert launcher.start("-np", "x").wait(5) == 2
    late = launcher.start("--model", "/nowhere", "-np", 2)
    assert "-np comes first" in late.communicate(timeout=5)[0] and late.returncode == 2
    assert launcher.start("--version").wait(5) == 0
    assert not os.listdir(launcher.place.sessions)

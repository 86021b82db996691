"""A client that stops reading costs bounded memory and delays nobody."""

import time

import dskv
import msgpack
import numpy as np
import zmq
from models import constant_rows
from support.daemon import Daemon

VOCAB, ROWS, REQUESTS = 50257, 60, 40  # 12 MB a reply, 480 MB in all
LIMIT = 320 << 20  # of replies that wait for one client
SLACK = 96 << 20


def test_a_client_that_does_not_read(tmp_path):
    constant_rows(tmp_path / "model", VOCAB)
    tokens = np.arange(1, ROWS + 1, dtype="<i4").tobytes()
    with Daemon(tmp_path / "model") as daemon, dskv.connect(daemon.endpoint) as other:
        wanted = other.forward([1, 2, 3], logits="last").logits.tobytes()
        before = other.stats().ranks[0].resident_bytes
        slow = zmq.Context.instance().socket(zmq.DEALER)
        slow.linger, slow.rcvhwm = 0, 1
        slow.connect(daemon.endpoint)
        slow.send(msgpack.packb({"v": 1, "id": 1, "op": "hello"}))
        session = msgpack.unpackb(slow.recv_multipart()[0])["session"]
        sequence = {"tokens": {"dtype": "i32", "shape": [ROWS], "frame": 1}, "want": {"logits": [0, ROWS]}}
        for id in range(2, REQUESTS + 2):
            fields = {"v": 1, "id": id, "op": "forward", "session": session, "sequences": [sequence]}
            slow.send_multipart([msgpack.packb(fields), tokens])
        most, slowest, backlog = 0, 0.0, []
        end = time.monotonic() + 60
        while time.monotonic() < end:
            start = time.monotonic()
            assert other.forward([1, 2, 3], logits="last", timeout=10).logits.tobytes() == wanted
            slowest = max(slowest, time.monotonic() - start)
            stats = other.stats()
            most = max(most, stats.ranks[0].resident_bytes)
            backlog.append(stats.backlog_bytes)
            if len(backlog) > 5 and max(backlog) > 0 and stats.sequences_active == stats.requests_queued == 0:
                break
            time.sleep(0.02)
        assert max(backlog) > 50 << 20, "the replies did not wait"
        assert max(backlog) <= LIMIT + (1 << 20)
        assert most - before <= LIMIT + SLACK, f"{most - before} bytes more"
        assert slowest < 5, f"another client waited {slowest:.1f} s"
        slow.close()
        while other.stats().backlog_bytes and time.monotonic() < end:
            time.sleep(0.02)
        assert other.stats().backlog_bytes == 0

"""Eight client processes with mixed work at the same time: each gets, to the bit, what it gets alone."""

import hashlib
import multiprocessing

import dskv
import numpy as np
from exact import tokens
from support.daemon import Daemon

N_CLIENTS, N_ROUNDS = 8, 4


def work(endpoint, number):
    """A digest of everything that this client sees: rows, scores, drafts, generated tokens, exported KV."""
    digest = hashlib.sha256()

    def note(*arrays):
        for array in arrays:
            digest.update(np.ascontiguousarray(array).tobytes())

    with dskv.connect(endpoint, timeout=120) as client:
        for turn in range(N_ROUNDS):
            seed = 100 * number + turn
            a = client.forward(tokens(3 + 17 * number + 41 * turn, seed), logits="last", argmax=True)
            note(a.logits, a.argmax)
            b = client.forward(
                tokens(5, seed + 50), prefix=a.cache[: len(a.cache) // 2], logits="all", score=True, topk=3
            )
            note(b.logits, b.scores, b.topk_ids, b.topk_logprobs)
            v = client.verify([7], tokens(6, seed), prefix=b.cache)
            note([v.accepted, v.next])
            g = client.generate([9], prefix=v.cache, max_tokens=6, temperature=1.0, seed=seed, ignore_eos=True)
            note(g.tokens)
            greedy = list(client.generate([9], prefix=a.cache, max_tokens=6, stream=True))
            note(*(event.tokens for event in greedy))
            many = client.forward_many(
                [dict(tokens=tokens(n, seed), prefix=g.cache if n % 2 else None, logits="last") for n in (1, 2, 30)]
            )
            note(*(made.logits for made in many))
            for keys, values in g.cache.export():
                note(keys, values)
    return digest.hexdigest()


def test_eight_clients_each_the_same_as_alone():
    context = multiprocessing.get_context("spawn")
    with Daemon("atlas-llama") as daemon:
        alone = [work(daemon.endpoint, number) for number in range(N_CLIENTS)]
        with context.Pool(N_CLIENTS) as pool:
            together = pool.starmap(work, [(daemon.endpoint, number) for number in range(N_CLIENTS)])
        assert together == alone
        assert len(set(alone)) == N_CLIENTS
        with dskv.connect(daemon.endpoint) as client:
            stats = client.stats()
            assert stats.caches == 0 and stats.blocks_used == 0, "closed clients left caches behind"

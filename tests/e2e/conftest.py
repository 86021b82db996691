"""Fixtures of the end-to-end tests: one daemon for a file's tests, and a client of it."""
import pytest

import dskv
from support.daemon import Daemon


@pytest.fixture(scope="module")
def daemon():
    with Daemon() as daemon:
        yield daemon


@pytest.fixture
def client(daemon):
    with dskv.connect(daemon.endpoint) as client:
        yield client

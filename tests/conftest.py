"""Shared fixtures. Everything runs offline on the CPU with one thread a worker."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

if not torch.cuda.is_available():
    # before Triton is imported: its kernels run on the CPU, slowly
    os.environ["TRITON_INTERPRET"] = "1"

from hypothesis import HealthCheck, settings

settings.register_profile(
    "suite", deadline=None, max_examples=12, suppress_health_check=list(HealthCheck)
)
settings.load_profile("suite")


def pytest_collection_modifyitems(items):
    """Of a grid marked `sampled(n)`, all but each n-th case are slow."""
    turns: dict[str, int] = {}
    for item in items:
        if (mark := item.get_closest_marker("sampled")) is None:
            continue
        name = item.nodeid.partition("[")[0]
        turn = turns[name] = turns.get(name, -1) + 1
        if turn % mark.args[0]:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def _nothing_noticed_yet():
    """A notice is printed once a process: no test may depend on those of the tests before it."""
    from commsweep import errors

    errors._noticed.clear()


@pytest.fixture(scope="session", autouse=True)
def _imported_once():
    """What was imported stays: each run of the tests would else look through all of it for
    garbage.
    """
    import gc

    import commsweep.models.causal_lm
    import commsweep.training.run  # noqa: F401

    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def store(tmp_path):
    from commsweep.store import Store

    return Store(tmp_path / "store")

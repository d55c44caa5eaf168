"""A process whose main thread has ended still saves and reads: in a function of `atexit`, or in another thread."""

from __future__ import annotations

import concurrent.futures.thread
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import everstep  # noqa: E402
from everstep.checkpoint.host.thread_pool import ThreadPool  # noqa: E402
from tests.checkpoint.sessions import session  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture
def main_thread_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as Python's pools of threads go: they take no work any more."""
    monkeypatch.setattr(concurrent.futures.thread, "_shutdown", True)


@pytest.mark.usefixtures("main_thread_has_ended")
def test_a_state_that_is_copied_and_read_by_several_threads_is_saved_and_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    large = torch.arange(1 << 20, dtype=torch.int64)
    with session(tmp_path) as ckpt:
        ckpt.track(model=torch.nn.ParameterDict({"weight": torch.nn.Parameter(large, requires_grad=False)}))
        ckpt.save(1)
    (state,) = everstep.load(tmp_path / "store")["model"].values()
    assert torch.equal(state, large)
    with session(tmp_path) as ckpt:
        model = torch.nn.ParameterDict({"weight": torch.nn.Parameter(torch.zeros_like(large), requires_grad=False)})
        assert ckpt.restore(model=model).step == 1
    assert torch.equal(model["weight"], large)


@pytest.mark.usefixtures("main_thread_has_ended")
def test_whoever_gives_work_to_threads_does_it_and_hears_its_error() -> None:
    with ThreadPool(2) as pool:
        assert list(pool.map(abs, [-1, 2])) == [1, 2]
        failed = pool.submit(int, "none")
    with pytest.raises(ValueError, match="none"):
        failed.result()


def test_a_pool_that_was_closed_takes_no_work() -> None:
    pool = ThreadPool(1)
    pool.shutdown()
    with pytest.raises(RuntimeError, match="after shutdown"):
        pool.submit(abs, 1)

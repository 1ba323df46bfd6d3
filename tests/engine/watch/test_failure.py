"""Messages that ranks exchange and print after a failure."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import pytest

from lightning_pipes.engine.watch import error_output, failure
from lightning_pipes.engine.watch.failure import FailureWatch, PeerFailure
from lightning_pipes.engine.watch.shared_store import store_on_loopback
from lightning_pipes.testing.ranks import scale_timeout


@pytest.fixture
def watches(own_heartbeats: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FailureWatch]]:
    monkeypatch.setattr(failure, "GRACE_SECONDS", scale_timeout(20.0))
    store = store_on_loopback(0, timedelta(seconds=20))
    made = [FailureWatch(store.clone(), rank, 3, enforce=False) for rank in range(3)]
    yield made
    for watch in made:
        watch.close()


def test_texts_come_from_all_ranks(watches: list[FailureWatch]) -> None:
    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(watch.exchange_texts, "a", str(n), 20.0) for n, watch in enumerate(watches)]
        assert [each.result() for each in asked] == [["0", "1", "2"]] * 3


def test_no_rank_waits_if_one_refuses(watches: list[FailureWatch]) -> None:
    """If one rank refuses the exchange, the other ranks return immediately without texts."""
    began = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(watch.exchange_texts, "a", "", 20.0) for watch in watches[:2]]
        assert watches[2].exchange_texts("a", None, 0.0) == []
        assert [each.result() for each in asked] == [[], []]
    assert time.monotonic() - began < scale_timeout(5.0)


def test_who_comes_too_late_gets_none(watches: list[FailureWatch]) -> None:
    """A rank that is too late receives no texts although they are stored, because the other ranks have continued."""
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda watch: watch.exchange_texts("a", "", 0.1), watches[:2])) == [[], []]
    assert watches[2].exchange_texts("a", "", 20.0) == []


def test_failure_names_an_error_without_text(watches: list[FailureWatch]) -> None:
    watches[0].report_failure(KeyboardInterrupt())
    assert str(watches[0].error) == "rank 0 failed: KeyboardInterrupt"


class RaisedError(Exception):
    """An error that user code raises on a rank."""


class RepeatedError(error_output.RemoteError):
    """An error that repeats an error of another rank."""


def printed(error: BaseException, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the text that the exception hook prints for an error."""
    sys.excepthook(type(error), error, error.__traceback__)
    return capsys.readouterr().err


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the original exception hook of the interpreter, which other tests may have changed."""
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setattr(error_output, "_failure", None)


def test_the_failing_rank_alone_prints_a_traceback(
    hook: None,
    watches: list[FailureWatch],
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The failed rank prints its traceback after the other ranks have logged the failure in one line each.

    The other ranks print no traceback, except if the environment variable requests it.
    """
    text = "Caught it in a worker.\nOriginal Traceback (most recent call last):\n  a line\nRaisedError: a bad sample"
    watches[1].report_failure(RaisedError(text))
    error_output.limit_tracebacks(watches[1])
    assert printed(RaisedError(text), capsys).splitlines()[-1].endswith("RaisedError: a bad sample")
    lines = [record.getMessage() for record in caplog.records]  # both ranks have logged before the traceback is printed
    line = "rank 1 failed: RaisedError: Caught it in a worker. RaisedError: a bad sample"
    assert sorted(lines) == [f"[rank 0] {line}", f"[rank 2] {line}"]
    error_output.limit_tracebacks(watches[0])
    with pytest.raises(PeerFailure) as raised:
        watches[0].check()
    assert printed(raised.value, capsys) == ""
    # all ranks raise this error, for example when they load the same sample
    assert printed(RaisedError(text), capsys) == ""
    assert printed(KeyError("at teardown"), capsys) == "after that: KeyError: 'at teardown'\n"
    monkeypatch.setenv(error_output.TRACEBACKS_VARIABLE, "1")
    assert "Traceback" in printed(raised.value, capsys)


def test_an_error_that_repeats_one_of_another_rank_is_a_line(
    hook: None, watches: list[FailureWatch], capsys: pytest.CaptureFixture[str]
) -> None:
    """An error that repeats an error of another rank is printed in one line.

    Ranks of a study raise such an error when the objective has failed on rank 0.
    """
    error_output.limit_tracebacks(watches[1])
    assert printed(RepeatedError("the study has ended"), capsys) == "RepeatedError: the study has ended\n"


def test_rank_that_others_declared_dead_prints_its_own_error(
    hook: None, watches: list[FailureWatch], capsys: pytest.CaptureFixture[str]
) -> None:
    """A rank prints the traceback of its own error even if another rank has reported it as dead before."""
    watches[0].report_lost_peer(1, ConnectionError("closed"))
    watches[1].report_failure(RaisedError("a bad day"))
    assert "rank 1 has ended" in str(watches[1].error)
    error_output.limit_tracebacks(watches[1])
    assert "RaisedError: a bad day" in printed(RaisedError("a bad day"), capsys)


def test_a_blocked_rank_is_stopped_with_one_line(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watchdog prints only the first line of the user's error, which was printed completely when it was raised."""
    stopped = threading.Event()
    monkeypatch.setattr(failure, "GRACE_SECONDS", 0.0)
    monkeypatch.setattr("os._exit", lambda status: stopped.set())
    monkeypatch.setattr("lightning_pipes.engine.watch.process_exit.claim_final_wait", lambda: False)
    others = threading.enumerate()
    watch = FailureWatch(store_on_loopback(0, timedelta(seconds=20)), 0, 1, enforce=True)
    watchdog = next(t for t in threading.enumerate() if t not in others and t.name.endswith("watchdog"))
    watch.report_failure(RaisedError("a bad file.\nDo one of these:\n(1) load another"))
    assert stopped.wait(scale_timeout(20.0))
    watch.close()
    watchdog.join()
    line = "[rank 0] is still blocked 0 s after the failure, and is stopped: rank 0 failed: RaisedError: a bad file."
    assert set(filter(None, capfd.readouterr().err.splitlines())) == {line}  # printed once for each check of the thread


class SlowStore:
    """A store in which the value of a rank appears after some checks. Each check takes `seconds` of virtual time."""

    def __init__(self, seconds: float, looks: int) -> None:
        self.now, self._seconds, self._looks = 0.0, seconds, looks

    def check(self, keys: list[str]) -> bool:
        self.now += self._seconds
        self._looks -= 1
        return self._looks <= 0

    def get(self, key: str) -> bytes:
        return b"there"


def wait_for_slow_rank(patch: pytest.MonkeyPatch, seconds: float) -> dict[int, str]:
    """Wait for a rank that needs 40 minutes to connect, with a limit of `seconds`."""
    store, watch = SlowStore(seconds=300.0, looks=8), FailureWatch(None, 0, 2, setup_seconds=seconds)
    clock = SimpleNamespace(monotonic=lambda: store.now, sleep=lambda seconds: None)
    patch.setattr(failure, "time", clock)
    return watch.wait_for_values(store, {1: "place/1"})


def test_a_task_that_srun_has_not_started_is_explained_at_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If a rank is missing and `srun` was not used, the log and the error explain it."""
    store = SlowStore(seconds=1.0, looks=1000)
    clock = SimpleNamespace(monotonic=lambda: store.now, sleep=lambda seconds: None)
    monkeypatch.setattr(failure, "time", clock)
    monkeypatch.setattr(FailureWatch, "missing_ranks", lambda _: [] if store.check([]) else [1])
    monkeypatch.setenv("SLURM_NTASKS", "2")
    monkeypatch.delenv("SLURM_STEP_ID", raising=False)
    with pytest.raises(
        PeerFailure, match=r"rank 1 did not connect .* within 100 s\. This process .* with `srun python"
    ):
        FailureWatch(None, 0, 2).wait_for_ranks(100.0, lambda: None)
    first, *later = [record.getMessage() for record in caplog.records]
    assert first.startswith("[rank 0] waits for rank 1 to connect. This process is in a SLURM job with 2 tasks")
    assert len(later) == 4  # one message every 30 s, and the failure
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    with pytest.raises(PeerFailure, match=r"within 100 s$"):
        FailureWatch(None, 0, 2).wait_for_ranks(100.0, lambda: None)


def test_setup_may_take_a_rank_as_long_as_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    assert wait_for_slow_rank(monkeypatch, 3600.0) == {1: "there"}


def test_a_rank_that_connects_too_late_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PeerFailure, match=r"rank 1 did not connect .* within 1800 s.*PipelineStrategy\(timeout="):
        wait_for_slow_rank(monkeypatch, 1800.0)

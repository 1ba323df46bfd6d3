"""What ranks of an array tell each other when there is nobody left to tell."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed import TCPStore

from lightning_pipes.arrays.siblings.sibling_board import Failure, PeerStore
from lightning_pipes.engine.watch.failure import FailureWatch, PeerFailure


class Gone:
    """A store whose host has been killed."""

    def __getattr__(self, name: str) -> Any:
        def ask(*args: Any) -> None:
            raise RuntimeError("Connection reset by peer")

        return ask


def test_a_store_that_has_gone_is_a_peer_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    watch = FailureWatch(store, 1, 2)
    monkeypatch.setattr(watch, "sub_store", Gone)
    board = PeerStore()
    board.open(watch, 1, 2)
    try:
        board.post_news(Failure(0, 1, "of no use to anybody"))
        board.post_value("ended/0")
        with pytest.raises(PeerFailure, match=r"does not answer \(Connection reset"):
            board.has_posted("ended/0", 0)
        watch.report_lost_peer(0, OSError("closed"))
        for ask in (
            lambda: board.has_posted("ended/0", 0),
            lambda: board.have_all_posted("ended/0"),
            lambda: board.values("room/0"),
            lambda: [*board.read_news()],
        ):
            with pytest.raises(PeerFailure, match="rank 0 has ended"):
                ask()
    finally:
        watch.close()

"""A stream over one prompt's answers in an engine that serves others too.

Invariant: every piece of every answer is handed out exactly once, in order, whoever makes the engine step; a stream
that is closed or forgotten leaves no request behind.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..errors import GenerationFailed
from ..generation.request import Request, StreamPiece

if TYPE_CHECKING:
    from .core import EngineCore


class RequestStream(Iterator[StreamPiece]):
    """Iterates over the pieces of `requests`, and makes the engine step when there is none to hand out.

    It is an object rather than a generator, because a generator that was never started cannot be closed: its request
    would run on without a reader.
    """

    def __init__(self, engine: EngineCore, requests: list[Request]) -> None:
        self._engine = engine
        self.requests = requests
        self._open = list(requests)  # whose last piece has not been handed out
        self._pieces: list[StreamPiece] = []

    @property
    def request_id(self) -> str:
        """For `abort`."""
        return self.requests[0].request_id

    def __iter__(self) -> RequestStream:
        return self

    def __next__(self) -> StreamPiece:
        while not self._pieces:
            if not self._open:
                raise StopIteration
            if not self._collect():
                try:
                    self._engine._advance()
                except BaseException as error:
                    self.close()
                    if isinstance(error, GenerationFailed):
                        error.outputs = [request.output() for request in self.requests]
                    raise
        return self._pieces.pop(0)

    def _collect(self) -> bool:
        """Takes what the answers have gained since the last look."""
        for request in list(self._open):
            piece = request.take_piece()
            if piece.token_ids or piece.text or piece.finish_reason:
                self._pieces.append(piece)
            if request.finished:
                self._open.remove(request)
        return bool(self._pieces)

    def close(self) -> None:
        """Aborts what has not ended; what was not read is dropped."""
        self._open, self._pieces = [], []
        self._engine._release(self.requests)

    def __del__(self) -> None:
        # Python may collect a forgotten stream in the middle of anything that the engine does, so that its requests are
        # only marked here; the next step takes them out.
        for request in getattr(self, "_open", ()):
            request.finish("abort", self._engine.clock())

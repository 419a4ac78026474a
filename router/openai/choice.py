"""One choice of an answer: its tokens become text, are checked for stop strings, and go to the response."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from router.detokenizer import Detokenizer
from router.stops import StopScanner
from transport.messages import FinishReason, Logprob


@dataclass(slots=True)
class TokenLogprob:
    """One position; `offset` is where the token's text begins in the choice's text, in characters."""

    entry: Logprob
    offset: int


#: (choice, text released by an engine step, logprobs since the last one shown, why it ended)
Emit = Callable[["Choice", str, list[TokenLogprob] | None, FinishReason | None], None]
#: fresh text state of a choice
MakeText = Callable[[], tuple[Detokenizer, StopScanner | None]]


class Choice:
    """The dispatcher's sink of one choice.

    With `emit` (a stream) each step is shown at once; without, `text` and `logprobs` grow until the end, and
    the generation may start anew.
    """

    __slots__ = (
        "_detokenizer",
        "_emit",
        "_make",
        "_offset",
        "_shown",
        "_stops",
        "completion_tokens",
        "finish",
        "index",
        "logprobs",
        "text",
        "want_logprobs",
    )

    def __init__(self, index: int, make: MakeText, *, want_logprobs: bool, emit: Emit | None) -> None:
        self.index = index
        self._make = make
        self._emit = emit
        self.want_logprobs = want_logprobs
        self._reset()

    def _reset(self) -> None:
        self._detokenizer, self._stops = self._make()
        self._offset = 0
        self._shown = False
        self.text = ""
        self.logprobs: list[TokenLogprob] = []
        self.completion_tokens = 0
        self.finish: FinishReason | None = None

    def restart(self) -> bool:
        if self._emit is not None:
            return False
        self._reset()
        return True

    def tokens(self, token_ids: list[int], logprobs: list[Logprob] | None, finish: FinishReason | None) -> bool:
        text, stops, last = "", self._stops, len(token_ids) - 1
        for i, token_id in enumerate(token_ids):
            self.completion_tokens += 1
            if self.want_logprobs and logprobs is not None and i < len(logprobs):
                self.logprobs.append(TokenLogprob(logprobs[i], self._offset))
            if finish == "stop" and i == last:
                break  # the token that ended the text (EOS, a stop token) is not part of it
            piece = self._detokenizer.step(token_id)
            if not piece:
                continue
            self._offset += len(piece)
            if stops is None:
                text += piece
                continue
            released, matched = stops.feed(piece)
            text += released
            if matched:
                finish = "stop"
                break
        if finish is not None:
            if stops is not None:
                text += stops.flush()
            self.finish = finish
        if self._emit is None:
            self.text += text
        elif text or finish is not None or not self._shown:
            self._show(self._emit, text, finish)
        return finish is not None

    def _show(self, emit: Emit, text: str, finish: FinishReason | None) -> None:
        shown: list[TokenLogprob] | None = None
        if self.want_logprobs:
            shown, self.logprobs = self.logprobs, []
        emit(self, text, shown, finish)
        self._shown = True

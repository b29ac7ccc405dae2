"""The text of a request's output while it grows."""

from paxkv.models.detokenizer import Detokenizer
from paxkv.models.tokenizer import Tokenizer
from paxkv.request import Completion
from paxkv.scheduler import Request
from paxkv.stop_strings import StopStrings

_NO_TOKEN = "no token could be chosen: the logits hold NaN or infinity, or every token is forbidden"


class OutputText:
    """Turns a request's tokens into text, up to a stop token or the first stop string.

    Args:
        request: Its `output` is read as it grows.
        tokenizer: None where there is none: then there are tokens and no text.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer | None) -> None:
        self.request = request
        self.text = ""
        self._num_read = 0
        self._stops = StopStrings(request.params.stop)
        self._detokenizer = tokenizer and Detokenizer(tokenizer, request.prompt)

    @property
    def has_stopped(self) -> bool:
        """Whether a stop string has come. What was decoded after it is left out."""
        return self._stops.match is not None

    def advance(self) -> str:
        """Reads the new tokens; returns the text that can be shown now."""
        delta = ""
        while self._num_read < len(self.request.output) and not self.has_stopped:
            token = self.request.output[self._num_read]
            self._num_read += 1
            delta += self._stops.push(self._spell(token))
        if self.request.finish_reason and not self.has_stopped and self._detokenizer:
            delta += self._stops.push(self._detokenizer.finish()) + self._stops.finish()
        self.text += delta
        return delta

    def completion(self) -> Completion:
        """The answer, once the request has ended or a stop string has come."""
        request, params = self.request, self.request.params
        reason = "stop" if self.has_stopped else request.finish_reason
        assert reason is not None
        return Completion(
            text=self.text,
            token_ids=request.output[: self._num_read],
            finish_reason=reason,
            prompt_token_ids=request.prompt,
            logprobs=None if params.logprobs is None else request.logprobs[: self._num_read],
            prompt_logprobs=None if params.prompt_logprobs is None else request.prompt_logprobs,
            error=_NO_TOKEN if reason == "error" else None,
        )

    def _spell(self, token: int) -> str:
        """A token's text; a stop token has none."""
        is_last = self._num_read == len(self.request.output)
        is_stop = is_last and self.request.finish_reason == "stop"
        return "" if is_stop or not self._detokenizer else self._detokenizer.push(token)

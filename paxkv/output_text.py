"""The text of a request's output while it grows."""

from paxkv.models.detokenizer import Detokenizer
from paxkv.models.tokenizer import Tokenizer
from paxkv.request import Completion
from paxkv.request_state import Request
from paxkv.samples import best_samples
from paxkv.stop_strings import StopStrings


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
            error=str(request.error) if request.error else None,
        )

    def _spell(self, token: int) -> str:
        """A token's text; a stop token has none."""
        is_last = self._num_read == len(self.request.output)
        is_stop = is_last and self.request.finish_reason == "stop"
        return "" if is_stop or not self._detokenizer else self._detokenizer.push(token)


class OutputSamples:
    """The text of all samples of one prompt while they grow.

    Args:
        request: Its `samples` are read, or itself if it is the only one.
        tokenizer: None where there is none.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer | None) -> None:
        self.request = request
        self._outputs = [OutputText(part, tokenizer) for part in request.parts]
        self._growing = list(self._outputs)

    @property
    def has_ended(self) -> bool:
        """Whether all samples have, as far as they have been read."""
        return not self._growing

    def advance(self) -> list[Request]:
        """Reads the new tokens; returns the requests that a stop string has ended."""
        for output in self._growing:
            output.advance()
        stopped = [output.request for output in self._growing if output.has_stopped]
        self._growing = [
            output
            for output in self._growing
            if not output.has_stopped and output.request.finish_reason is None
        ]
        return stopped

    def completion(self) -> Completion:
        """The answer, once all samples have ended."""
        return best_samples([output.completion() for output in self._outputs], self.request.params)

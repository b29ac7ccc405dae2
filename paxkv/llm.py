"""A model with its tokenizer and its cache: text in, text out."""

import dataclasses
import math
import numbers
import operator
from collections.abc import Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from paxkv.beam_batches import BeamParams, Found, search_beams
from paxkv.beams import EarlyStopping
from paxkv.compilation_cache import use_compilation_cache
from paxkv.config import num_pages_for, pages_of
from paxkv.decoder import Decoder
from paxkv.engine import Engine
from paxkv.logits_processors import LogitsProcessor
from paxkv.memory import format_bytes, free_bytes, parse_bytes
from paxkv.memory_trace import MemoryTrace, open_trace
from paxkv.models.bundled import name_or_bundled, recommended_sampling
from paxkv.models.chat_template import render_chat
from paxkv.models.generation import GenerationConfig
from paxkv.models.load import checked_dtype, load_model
from paxkv.models.tokenizer import Tokenizer
from paxkv.models.weights import OnProgress
from paxkv.output_text import OutputSamples, OutputText
from paxkv.request import Completion, SamplingParams
from paxkv.request_state import Request
from paxkv.samples import best_samples
from paxkv.slots import DEFAULT_PROCESSOR

type Prompt = str | Sequence[int]  # text or token ids

_DEFAULT_MAX_LENGTH = 4096  # tokens, where the model can do more
_STREAM_BURST = 2  # decode steps between two looks of a stream
_STOP_STRING_BURST = 8  # and where a stop string may make the rest useless


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StreamPiece:
    """Some more of a streamed answer."""

    text: str
    completion: Completion | None = None  # the whole answer, with the last piece


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """How likely a model finds a text."""

    token_ids: list[int]
    logprobs: list[float]  # natural, of every token but the first, which nothing predicts
    perplexity: float  # exp of minus their mean; NaN for a single token


class LLM:
    """Generates text from a paged KV cache.

        llm = paxkv.LLM()  # the bundled SmolLM2-135M-Instruct
        [completion] = llm.generate("Paging is", SamplingParams(max_tokens=32, temperature=0))
        print(completion.text)

    Args:
        model: A model folder, a GGUF file or a Hugging Face hub id; the bundled SmolLM2 when None.
            Or a decoder of your own (see `paxkv.decoder`), with its `tokenizer` or without.
        tokenizer: Only for a decoder of your own.
        dtype: Of weights, activations, keys and values: bfloat16, float16 or float32. A decoder
            of your own has its weights already.
        page_size: Tokens per page.
        kv_memory: Bytes for the cache, as a number or like "2GB". When None, `memory_share` of
            what is free, and not more than `max_slots` requests of `max_length` can fill.
        memory_share: See `kv_memory`.
        max_slots: Requests that run at once.
        max_length: Prompt and output of one request, in tokens; 4096, or what the model was made
            for if that is less, when None.
        max_prefill_tokens: Prompt tokens in one call, a power of two.
        max_burst: Decode steps between two looks of the host.
        seed: What requests without a seed of their own draw from.
        prefix_caching: Keep what requests have stored, while there is room, for later ones that
            begin with the same tokens.
        memory_trace: Where to log what the memory is used for, for `paxkv diagnose`.
        processor: Changes logits before sampling (see `paxkv.logits_processors`).
        compilation_cache: Keeps compiled programs in the user's cache folder.
        on_progress: Called with bytes loaded and bytes in all while the weights load.

    Raises:
        ValueError: The model cannot be read, or not one page fits in the memory.
    """

    def __init__(
        self,
        model: str | Path | Decoder | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        dtype: DTypeLike = "bfloat16",
        page_size: int = 16,
        kv_memory: int | str | None = None,
        memory_share: float = 0.5,
        max_slots: int = 32,
        max_length: int | None = None,
        max_prefill_tokens: int = 1024,
        max_burst: int = 32,
        seed: int = 0,
        prefix_caching: bool = True,
        memory_trace: MemoryTrace | str | Path | None = None,
        processor: LogitsProcessor = DEFAULT_PROCESSOR,
        compilation_cache: bool = True,
        on_progress: OnProgress | None = None,
    ) -> None:
        dtype = checked_dtype(dtype)
        if compilation_cache:
            use_compilation_cache()
        self.generation = GenerationConfig()
        longest = _DEFAULT_MAX_LENGTH
        if isinstance(model, str | Path | None):
            loaded = load_model(name_or_bundled(model), dtype=dtype, on_progress=on_progress)
            decoder, files = loaded.decoder, loaded.files
            tokenizer = (
                Tokenizer.from_folder(files.path)
                if files.gguf_metadata is None
                else Tokenizer.from_gguf(files.gguf_metadata)
            )
            self.generation = files.generation
            if model is None:
                self.generation = recommended_sampling(files.generation)
            made_for = files.config.max_position
            if isinstance(max_length, numbers.Real) and max_length > made_for:
                raise ValueError(
                    f"{max_length=}, but the model was made for {made_for} tokens: lower it, or "
                    "correct the maximum in the model's configuration"
                )
            longest = min(longest, made_for)
        else:
            decoder = model
        self.tokenizer = tokenizer
        max_length = longest if max_length is None else max_length
        sizes = {"max_slots": max_slots, "page_size": page_size, "max_length": max_length}
        for name, size in sizes.items():
            least = 2 if name == "max_length" else 1
            if not isinstance(size, numbers.Integral) or size < least:
                raise ValueError(f"{name}={size!r} must be a whole number, at least {least}")
        num_pages = _num_pages(
            decoder, dtype, page_size, kv_memory, memory_share,
            max_slots=max_slots, max_length=max_length, max_prefill_tokens=max_prefill_tokens,
        )  # fmt: skip
        self.engine = Engine(
            decoder, num_slots=max_slots, max_length=max_length, num_pages=num_pages,
            page_size=page_size, dtype=dtype, max_prefill_tokens=max_prefill_tokens,
            max_burst=max_burst, seed=seed, prefix_caching=prefix_caching, processor=processor,
            memory_trace=open_trace(
                memory_trace, model=str(model) if isinstance(model, str | Path) else ""
            ),
        )  # fmt: skip

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Continues prompts, as many at a time as there are slots and pages.

        Args:
            prompts: One or more, as text or token ids.
            params: For all, or one for each.

        Returns:
            A completion for each prompt, in their order. One that cannot be served has
            `finish_reason` "error" and says why in `error`; the others are not disturbed.
        """
        prompts = _as_list(prompts)
        completions = dict(self.as_completed(prompts, params))
        return [completions[i] for i in range(len(prompts))]

    def as_completed(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Generator[tuple[int, Completion], None, None]:
        """Like `generate`, but yields (index of the prompt, completion) as they end.

        Leaving the loop early drops the requests that have not ended.
        """
        prompts = _as_list(prompts)
        running: dict[int, OutputSamples] = {}
        try:
            for i, (prompt, its) in enumerate(zip(prompts, _each(params, prompts), strict=True)):
                try:
                    request = self._add(prompt, its)
                except ValueError as error:
                    yield i, _refused(prompt, error)
                else:
                    running[i] = OutputSamples(request, self.tokenizer)
            while running:
                self._step(running.values())
                # The caller may use this LLM between two yields, and other threads may at any time:
                # each request may have news, and has no more of them while it is read.
                with self.engine.turns.lock:
                    for samples in running.values():
                        for sample in samples.advance():
                            self.engine.abort(sample.id, "stop")
                for i in [i for i, samples in running.items() if samples.has_ended]:
                    yield i, running.pop(i).completion()
        finally:
            for samples in running.values():
                self.engine.abort(samples.request.id)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> Generator[StreamPiece, None, None]:
        """Continues one prompt piece by piece.

        No piece ends inside a character, and none is shown that a stop string would take back.
        Leaving the loop early, or closing what this returns, drops the request.

        Raises:
            ValueError: The prompt cannot be served, or `params` asks for more than one sample.
        """
        params = params or SamplingParams()
        if params.num_samples > 1:
            raise ValueError(
                f"n={params.n} and best_of={params.best_of} draw {params.num_samples} samples, and "
                "a stream gives one: use generate or as_completed"
            )
        request = self._add(prompt, params)
        output = OutputText(request, self.tokenizer)
        try:
            while True:
                with self.engine.turns.lock:  # no news between these, by other threads' steps
                    self.engine.step(_STREAM_BURST)
                    text = output.advance()
                    if output.has_stopped:
                        self.engine.abort(request.id, "stop")
                    has_ended = request.finish_reason is not None
                if has_ended:
                    completion = best_samples([output.completion()], params)
                    yield StreamPiece(text=text, completion=completion)
                    return
                if text:
                    yield StreamPiece(text=text)
        finally:
            self.engine.abort(request.id)

    def chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None
    ) -> Completion:
        """Answers a conversation of `{"role": ..., "content": ...}` messages."""
        return self.generate(self.chat_prompt(messages), params)[0]

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The token ids that the model's chat template makes of a conversation.

        Raises:
            ValueError: The model has no chat template, or it refuses the messages.
        """
        tokenizer = self._needs_tokenizer()
        text = render_chat(
            tokenizer.chat_template, messages, special_tokens=tokenizer.special_tokens
        )
        try:
            return tokenizer.encode(text, add_special_tokens=False)
        except TypeError:
            raise ValueError(f"the conversation is no Unicode text: {text!r:.200}") from None

    def beam_search(
        self,
        prompts: Prompt | Iterable[Prompt],
        *,
        width: int = 4,
        length_penalty: float = 1.0,
        early_stopping: EarlyStopping = False,
        max_tokens: int | None = None,
        num_return: int | None = None,
        stop_token_ids: Iterable[int] = (),
        ignore_eos: bool = False,
    ) -> list[list[Completion]]:
        """The likeliest continuations of prompts that a beam search finds.

        As in `transformers`, token for token. Beams are ranked by the model's own probabilities:
        no temperature, no penalty of the model's generation_config, no logits processor.

        Args:
            prompts: One or more, as text or token ids.
            width: Beams of each prompt (`num_beams`, `beam_width`); each takes a slot.
            length_penalty: A score is the sum of log-probabilities over this power of the number of
                new tokens: above 0 favours long answers, below 0 short ones.
            early_stopping: When a prompt's search ends: True, once it has as many answers as
                beams; False, once no beam scores better than those at its present length; "never",
                once none can at any length.
            max_tokens: New tokens at most; as in `SamplingParams`.
            num_return: Answers for each prompt (`num_return_sequences`); all of them when None.
            stop_token_ids: Tokens that end an answer, besides the model's own.
            ignore_eos: Has the model's own not end it.

        Returns:
            For each prompt the answers, best first, each with its `score`. For a prompt that
            cannot be served, one with `finish_reason` "error" that says why in `error`; a pool
            that is too small for the beams is such a reason.

        Raises:
            ValueError: A setting is out of range, or there are fewer slots than beams.
            RuntimeError: Requests are running.
        """
        beams = BeamParams(
            width=width, length_penalty=length_penalty, early_stopping=early_stopping,
            num_return=num_return,
        )  # fmt: skip
        params = SamplingParams(
            max_tokens=max_tokens, stop_token_ids=stop_token_ids, ignore_eos=ignore_eos
        )
        answers: list[list[Completion]] = []
        requests: dict[int, Request] = {}
        for i, prompt in enumerate(_as_list(prompts)):
            answers.append([])
            try:
                request = self._asked(prompt, params)
                self.engine.prepare(request)
                requests[i] = request
            except ValueError as error:
                answers[i] = [_refused(prompt, error)]
        found = search_beams(self.engine, list(requests.values()), beams)
        for (i, request), its in zip(requests.items(), found, strict=True):
            if isinstance(its, str):
                answers[i] = [_refused(request.prompt, its)]
            else:
                answers[i] = [self._completion(request, answer) for answer in its]
        return answers

    def score(self, texts: Prompt | Iterable[Prompt]) -> list[Score]:
        """How likely the model finds texts, token by token.

        Raises:
            ValueError: A text cannot be served.
        """
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        return [_score(completion) for completion in self.generate(texts, params)]

    @property
    def weights(self) -> nnx.State:
        """The decoder's weights, as `optax` and `set_weights` take them."""
        return nnx.state(self.engine.decoder)

    def set_weights(self, weights: nnx.State) -> None:
        """Goes on with other weights of the same shapes and dtypes, without compiling again.

        Raises:
            ValueError: They have other shapes or dtypes.
            RuntimeError: Requests are running.
        """
        self.engine.set_decoder(nnx.merge(nnx.graphdef(self.engine.decoder), weights))

    def _add(self, prompt: Prompt, params: SamplingParams) -> Request:
        request = self._asked(prompt, params)
        self.engine.add(request)
        return request

    def _asked(self, prompt: Prompt, params: SamplingParams) -> Request:
        """What is asked of the engine."""
        if params.stop and self.tokenizer is None:
            raise ValueError(
                f"stop={params.stop!r} is looked for in text, and there is no tokenizer: stop at "
                "stop_token_ids, or give LLM a tokenizer"
            )
        return Request(
            prompt=self._tokens_of(prompt),
            params=params.with_defaults(self.generation),
            stop_token_ids=() if params.ignore_eos else self.generation.eos_token_ids,
        )

    def _completion(self, request: Request, found: Found) -> Completion:
        reason = "stop" if found.is_stopped else "length"
        output = OutputText(
            dataclasses.replace(request, output=found.token_ids, finish_reason=reason),
            self.tokenizer,
        )
        output.advance()
        return dataclasses.replace(output.completion(), score=found.score)

    def _step(self, running: Iterable[OutputSamples]) -> None:
        has_stops = any(samples.request.params.stop for samples in running)
        self.engine.step(_STOP_STRING_BURST if has_stops else None)

    def _tokens_of(self, prompt: Prompt) -> list[int]:
        try:
            if isinstance(prompt, str):
                return self._needs_tokenizer().encode(prompt)
            is_strange = isinstance(prompt, bytes) or any(isinstance(t, bool) for t in prompt)
            if not is_strange:
                return [operator.index(token) for token in prompt]
        except TypeError:
            pass  # not a sequence of integers, or text that is not Unicode
        raise ValueError(f"a prompt must be text or a list of token ids, found {prompt!r:.60}")

    def _needs_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError("there is no tokenizer: give prompts as token ids, or LLM a tokenizer")
        return self.tokenizer


def _num_pages(
    decoder: Decoder,
    dtype: DTypeLike,
    page_size: int,
    kv_memory: int | str | None,
    memory_share: float,
    *,
    max_slots: int,
    max_length: int,
    max_prefill_tokens: int,
) -> int:
    if not 0 < memory_share <= 1:
        raise ValueError(f"{memory_share=} must be above 0 and at most 1")
    free = free_bytes()
    memory = int(free * memory_share) if kv_memory is None else parse_bytes(kv_memory)
    if memory > free:
        raise ValueError(
            f"kv_memory={kv_memory} is {format_bytes(memory)}, and {format_bytes(free)} are free"
        )
    fits = num_pages_for(
        memory, decoder.layer_groups, page_size=page_size, dtype=jnp.dtype(dtype),
        num_slots=max_slots, at_once=max_prefill_tokens,
    )  # fmt: skip
    needed = 1 + max_slots * pages_of(max_length, page_size)
    return fits if kv_memory is not None else min(fits, needed)


def _as_list(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Iterable) or getattr(prompts, "ndim", 1) == 0:
        raise ValueError(f"prompts={prompts!r:.60} must be text, token ids, or several of them")
    items: list[Any] = list(prompts)
    is_one_prompt = items and all(isinstance(item, numbers.Number) for item in items)
    return [items] if is_one_prompt else items


def _each(
    params: SamplingParams | Sequence[SamplingParams] | None, prompts: list[Prompt]
) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * len(prompts)
    if len(params) != len(prompts):
        raise ValueError(f"{len(params)} params for {len(prompts)} prompts: give one, or one each")
    return params


def _refused(prompt: Prompt, error: ValueError | str) -> Completion:
    return Completion(
        text="",
        token_ids=[],
        finish_reason="error",
        prompt_token_ids=list(prompt) if isinstance(prompt, list | tuple) else [],
        error=str(error),
    )


def _score(completion: Completion) -> Score:
    if completion.error:
        raise ValueError(f"a text cannot be scored: {completion.error}")
    assert completion.prompt_logprobs is not None
    logprobs = [token.logprob for token in completion.prompt_logprobs if token]
    mean = math.fsum(logprobs) / len(logprobs) if logprobs else math.nan
    return Score(
        token_ids=completion.prompt_token_ids, logprobs=logprobs, perplexity=math.exp(-mean)
    )

"""What a caller asks for and what comes back. Plain Python, no jax."""

import dataclasses
import math
import numbers
from collections.abc import Callable, Iterable, Mapping
from typing import Literal, Protocol, Self

type FinishReason = Literal["stop", "length", "abort", "error"]

MAX_LOGPROBS = 20  # best tokens listed at each place
MAX_SAMPLES = 65_536  # of one prompt; more is taken for a slip
MAX_LOGIT_BIASES = 300  # tokens of one request, as in OpenAI's interface
_MAX_FLOAT32 = 3.4028234663852886e38  # what the device computes with has no larger numbers


class SamplingDefaults(Protocol):
    """What a model's generation_config says; `None` where it says nothing."""

    @property
    def max_new_tokens(self) -> int | None:
        """`max_tokens` by another name."""
        ...

    @property
    def temperature(self) -> float | None:
        """0 is greedy."""
        ...

    @property
    def top_k(self) -> int | None:
        """0 keeps every token."""
        ...

    @property
    def top_p(self) -> float | None:
        """1 keeps every token."""
        ...

    @property
    def min_p(self) -> float | None:
        """0 keeps every token."""
        ...

    @property
    def repetition_penalty(self) -> float | None:
        """1 is off."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to continue one prompt. `None` means: as the model's generation_config says, else off.

    `stop` may be one string, `logit_bias` a dict, and where several values belong any iterable
    does: they are kept as tuples.

    Raises:
        TypeError: A value is of the wrong kind, such as a string where a number belongs.
        ValueError: A value is out of range. Both messages name the value and what is allowed.
    """

    max_tokens: int | None = None  # new tokens at most; default 256
    temperature: float | None = None  # 0 takes the most likely token; default 1.0
    top_k: int | None = None  # keep the k most likely tokens; 0 or -1 keeps all
    top_p: float | None = None  # keep the smallest set of tokens with this probability; default 1.0
    min_p: float | None = None  # drop tokens below this share of the best one's probability
    seed: int | None = None  # same seed, same draws, whatever else is in the batch
    n: int = 1  # samples of each prompt
    best_of: int | None = None  # draw so many, keep the n with the best mean log-probability
    stop: str | Iterable[str] = ()  # ends the text before the first of these strings
    stop_token_ids: Iterable[int] = ()  # ends it at one of these; with the model's, at most 16
    ignore_eos: bool = False
    min_tokens: int = 0  # no stop token before this many; stop strings end a text all the same
    logprobs: int | None = None  # of the chosen token and this many best ones
    prompt_logprobs: int | None = None  # the same for the prompt's tokens
    repetition_penalty: float | None = None  # above 1: tokens of prompt and output are less likely
    presence_penalty: float = 0.0  # taken off the logit of each token in the output
    frequency_penalty: float = 0.0  # taken off once for each time it stands there
    logit_bias: Mapping[int, float] | Iterable[tuple[int, float]] = ()  # added to tokens' logits

    def __post_init__(self) -> None:
        for name, check in _CHECKS.items():
            value = getattr(self, name)
            if value is not None or name not in _MAY_BE_NONE:
                object.__setattr__(self, name, check(name, value))  # frozen, but not yet
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens={self.min_tokens} must be at most max_tokens={self.max_tokens}"
            )
        if self.best_of is not None and self.best_of < self.n:
            raise ValueError(
                f"best_of={self.best_of} must be at least n={self.n}: n of so many are kept"
            )

    def with_defaults(self, model: SamplingDefaults | None = None) -> Self:
        """Settles what the caller left open: as the model says, else neutral."""
        settled = {}
        for name, neutral in _NEUTRAL.items():
            name_of_model = "max_new_tokens" if name == "max_tokens" else name
            choices = getattr(self, name), getattr(model, name_of_model, None), neutral
            settled[name] = next(choice for choice in choices if choice is not None)
        if self.max_tokens is None:  # a least length that was asked for outweighs a default
            settled["max_tokens"] = max(settled["max_tokens"], self.min_tokens)
        return dataclasses.replace(self, **settled)

    @property
    def num_samples(self) -> int:
        """How many are drawn, of which `n` are kept."""
        return self.best_of or self.n

    @property
    def is_settled(self) -> bool:
        """Whether nothing is left open for the model to say."""
        return all(getattr(self, name) is not None for name in _NEUTRAL)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """A token's natural log-probability, and the best ones at its place."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, log-probability), best first


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The answer to one prompt.

    Where several samples were asked for, `samples` has all of them; it is the first.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    prompt_token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None  # None for the first token
    score: float | None = None  # what beams, and the samples of `best_of`, are ranked by
    error: str | None = None
    samples: "list[Completion]" = dataclasses.field(default_factory=list, repr=False)


def _integer(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name}={value!r} must be an integer")
    return int(value)


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}={value!r} must be a number")
    try:
        number = float(value)
    except OverflowError:
        raise ValueError(f"{name} must be within float32's {_MAX_FLOAT32}") from None
    if _MAX_FLOAT32 < abs(number) < math.inf:
        raise ValueError(f"{name}={number} must be within float32's {_MAX_FLOAT32}")
    return number


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r} must be True or False")
    return value


def _within[T: (int, float)](
    read: Callable[[str, object], T], is_allowed: Callable[[T], bool], allowed: str
) -> Callable[[str, object], T]:
    """A check that reads one number and refuses those that are not allowed."""

    def check(name: str, value: object) -> T:
        number = read(name, value)
        if not is_allowed(number):
            raise ValueError(f"{name}={number} must be {allowed}")
        return number

    return check


def _items(name: str, value: object, kind: str) -> tuple:
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise TypeError(f"{name}={value!r} must be a list of {kind}")
    return tuple(value)


def _stop_strings(name: str, value: object) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else _items(name, value, "strings")
    for text in strings:
        if not isinstance(text, str):
            raise TypeError(f"{name} holds {text!r}: it must be a string or a list of strings")
        if not text:
            raise ValueError(f"{name} holds an empty string, which is in every text: leave it out")
    return strings


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    return tuple(_token_id(f"{name} item", x) for x in _items(name, value, "token ids"))


def _biases(name: str, value: object) -> tuple[tuple[int, float], ...]:
    items = value.items() if isinstance(value, Mapping) else value
    biases = []
    for item in _items(name, items, "(token id, bias) pairs"):
        if not isinstance(item, list | tuple) or len(item) != 2:
            raise TypeError(f"{name} holds {item!r}: it must hold (token id, bias) pairs")
        biases.append((_token_id(f"{name} id", item[0]), _bias(f"{name} of {item[0]}", item[1])))
    if len(biases) > MAX_LOGIT_BIASES:
        raise ValueError(
            f"{name} names {len(biases)} tokens; at most {MAX_LOGIT_BIASES} are allowed"
        )
    if len(dict(biases)) < len(biases):
        raise ValueError(f"{name} names a token twice: add its biases up")
    return tuple(biases)


_token_id = _within(_integer, lambda n: n >= 0, "a token id, 0 or more")
_bias = _within(_number, lambda x: x < math.inf, "finite, or -inf to forbid the token")
_count = _within(_integer, lambda n: n >= 1, "1 or more")
_num_samples = _within(_integer, lambda n: 1 <= n <= MAX_SAMPLES, f"from 1 to {MAX_SAMPLES}")
_num_listed = _within(
    _integer, lambda n: 0 <= n <= MAX_LOGPROBS, f"from 0 to {MAX_LOGPROBS}, or None for none"
)
_penalty = _within(_number, lambda x: -2 <= x <= 2, "from -2 to 2; 0 is off")
_CHECKS: dict[str, Callable[[str, object], object]] = {
    "max_tokens": _count,
    "temperature": _within(
        _number, lambda x: 0 <= x < math.inf, "finite and 0 or more; 0 takes the best token"
    ),
    "top_k": _within(_integer, lambda n: n >= -1, "1 or more, or 0 or -1 to keep every token"),
    "top_p": _within(
        _number,
        lambda x: 0 < x <= 1,
        "above 0 and at most 1; for the most likely token only, set temperature=0",
    ),
    "min_p": _within(_number, lambda x: 0 <= x <= 1, "from 0 to 1; 0 keeps every token"),
    "seed": _integer,
    "n": _num_samples,
    "best_of": _num_samples,
    "stop": _stop_strings,
    "stop_token_ids": _token_ids,
    "ignore_eos": _flag,
    "min_tokens": _within(_integer, lambda n: n >= 0, "0 or more"),
    "logprobs": _num_listed,
    "prompt_logprobs": _num_listed,
    "repetition_penalty": _within(
        _number, lambda x: 1e-6 <= x <= 1e6, "from 1e-06 to 1e+06; 1 is off"
    ),
    "presence_penalty": _penalty,
    "frequency_penalty": _penalty,
    "logit_bias": _biases,
}
_NEUTRAL = {
    "max_tokens": 256,
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
_MAY_BE_NONE = {*_NEUTRAL, "seed", "best_of", "logprobs", "prompt_logprobs"}

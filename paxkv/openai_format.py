"""Requests and answers as OpenAI's interface writes them: bodies of JSON."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from paxkv.llm import LLM, Prompt
from paxkv.request import MAX_LOGPROBS, Completion, SamplingParams, TokenLogprob

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"

# Fields that `SamplingParams` has by the same name; the last five are not OpenAI's but vLLM's.
_SAME_NAMES = (
    "max_tokens", "temperature", "top_p", "seed", "stop", "presence_penalty", "frequency_penalty",
    "n", "best_of",
    "top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos",
)  # fmt: skip
_OF_OTHERS = ("stop_token_ids", "logit_bias", "logprobs", "top_logprobs", "max_completion_tokens")
# What only tells requests apart, or asks for what is done anyway.
_WITHOUT_EFFECT = {"model", "user", "metadata", "store", "service_tier"}
_ONLY = {"stream": False, "echo": False, "suffix": None}


class Asked(NamedTuple):
    """What a body asks for."""

    prompt: Prompt
    params: SamplingParams


def read_body(llm: LLM, url: str, body: Mapping[str, Any]) -> Asked:
    """The prompt and the settings of a request.

    Args:
        llm: Whose chat template writes conversations out.
        url: `CHAT` or `COMPLETIONS`.
        body: As it was sent.

    Raises:
        ValueError: It cannot be served; the message names the field, what was found there and what
            is allowed.
    """
    if url not in (CHAT, COMPLETIONS):
        raise ValueError(f"url is {url!r}; {CHAT} and {COMPLETIONS} are served")
    text_field = "messages" if url == CHAT else "prompt"
    given = {name: value for name, value in body.items() if value is not None}
    if text_field not in given:
        raise ValueError(f"the body has no {text_field!r}, which {url} continues")
    for name, only in _ONLY.items():
        if given.pop(name, only) != only:
            raise ValueError(f"{name}={body[name]!r} is not served, only {name}={only!r}")
    known = {text_field, *_SAME_NAMES, *_OF_OTHERS, *_WITHOUT_EFFECT}
    if unknown := sorted(given.keys() - known):
        raise ValueError(f"the body has fields that are not known: {', '.join(unknown)}")
    try:
        params = _sampling_params(given, is_chat=url == CHAT)
    except TypeError as error:
        raise ValueError(str(error)) from error
    text = given[text_field]
    if url == CHAT:
        return Asked(llm.chat_prompt(text), params)
    if not isinstance(text, str | list):
        raise ValueError(f"prompt={text!r:.60} must be text or a list of token ids")
    return Asked(text, params)


def _sampling_params(given: Mapping[str, Any], *, is_chat: bool) -> SamplingParams:
    fields = {name: given[name] for name in _SAME_NAMES if name in given}
    if "max_completion_tokens" in given:
        fields["max_tokens"] = given["max_completion_tokens"]
    if "stop_token_ids" in given:
        fields["stop_token_ids"] = given["stop_token_ids"]
    if "logit_bias" in given:
        fields["logit_bias"] = _biases(given["logit_bias"])
    logprobs = given.get("logprobs")
    if is_chat:
        if not isinstance(logprobs, bool | None):
            raise ValueError(f"logprobs={logprobs!r} must be true or false; see top_logprobs")
        if "top_logprobs" in given and not logprobs:
            raise ValueError("top_logprobs wants logprobs to be true")
        logprobs = given.get("top_logprobs", 0) if logprobs else None
    elif "top_logprobs" in given:
        raise ValueError(
            f"top_logprobs is for {CHAT}: set logprobs to a number, 0 to {MAX_LOGPROBS}"
        )
    return SamplingParams(**fields, logprobs=logprobs)


def _biases(given: Any) -> dict[int, float]:
    """JSON's keys are text: `{"42": -100}` biases token 42."""
    if not isinstance(given, Mapping):
        raise ValueError(f"logit_bias={given!r} must map token ids to numbers")
    try:
        return {int(token): bias for token, bias in given.items()}
    except ValueError:
        raise ValueError(f"logit_bias={given!r} must have token ids for keys") from None


def write_body(
    llm: LLM, url: str, completion: Completion, *, id: str, model: str, created_seconds: int
) -> dict[str, Any]:
    """The answer to a request, as `url` gives it.

    Args:
        llm: What spells tokens out.
        url: `CHAT` or `COMPLETIONS`.
        completion: What was generated.
        id: Tells answers apart.
        model: Its name.
        created_seconds: Since 1970.
    """
    is_chat = url == CHAT
    samples = completion.samples or [completion]
    num_prompt = len(completion.prompt_token_ids)
    num_new = sum(len(sample.token_ids) for sample in samples)
    return {
        "id": id,
        "object": "chat.completion" if is_chat else "text_completion",
        "created": created_seconds,
        "model": model,
        "choices": [
            {"index": i, **_choice(llm, sample, is_chat=is_chat)}
            for i, sample in enumerate(samples)
        ],
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_new,
            "total_tokens": num_prompt + num_new,
        },
    }


def _choice(llm: LLM, sample: Completion, *, is_chat: bool) -> dict[str, Any]:
    logprobs = None
    if sample.logprobs is not None:
        logprobs = (_chat_logprobs if is_chat else _text_logprobs)(llm, sample.logprobs)
    message = {"role": "assistant", "content": sample.text}
    said = {"message": message} if is_chat else {"text": sample.text}
    return {**said, "logprobs": logprobs, "finish_reason": sample.finish_reason}


def error_body(message: str) -> dict[str, Any]:
    """What an answer says where a request was refused."""
    return {"error": {"message": message, "type": "invalid_request_error"}}


def _spell(llm: LLM) -> Callable[[int], str]:
    return lambda token: "" if llm.tokenizer is None else llm.tokenizer.decode([token])


def _chat_logprobs(llm: LLM, logprobs: list[TokenLogprob]) -> dict[str, Any]:
    spell = _spell(llm)
    return {
        "content": [
            {
                "token": spell(token.token_id),
                "logprob": token.logprob,
                "top_logprobs": [{"token": spell(i), "logprob": x} for i, x in token.top],
            }
            for token in logprobs
        ]
    }


def _text_logprobs(llm: LLM, logprobs: list[TokenLogprob]) -> dict[str, Any]:
    spell = _spell(llm)
    return {
        "tokens": [spell(token.token_id) for token in logprobs],
        "token_logprobs": [token.logprob for token in logprobs],
        "top_logprobs": [{spell(i): x for i, x in token.top} for token in logprobs],
    }

"""OpenAI's batch files, what is asked and what came back, as rows of a trace.

The format: https://platform.openai.com/docs/guides/batch
"""

from collections.abc import Mapping
from typing import Any

_BYTES_PER_TOKEN = 4  # of English text, by the usual rule of thumb


def is_batch_line(row: Mapping[str, Any]) -> bool:
    """Whether a JSON object is a line of a batch's input or output file."""
    return "custom_id" in row and ("body" in row or "response" in row)


def batch_row(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """`prompt_tokens` and `output_tokens` of a line; None for a request that failed.

    What came back says exactly how long it was. What is asked is estimated from its text, with
    as much output as it allows.

    Raises:
        ValueError: The line tells no lengths.
    """
    if "response" in row:
        if row.get("error") or not (usage := _usage(row["response"])):
            return None
        return {
            "prompt_tokens": usage.get("prompt_tokens"),
            "output_tokens": usage.get("completion_tokens"),
        }
    body = row.get("body")
    if not isinstance(body, Mapping):
        raise ValueError("its body is no object")
    output = body.get("max_completion_tokens") or body.get("max_tokens")
    if output is None:
        raise ValueError(
            "it names neither max_tokens nor max_completion_tokens, so how long its output may be "
            "is not known: add one, or give the batch's output file, which tells the true lengths"
        )
    prompt = body["prompt"] if "prompt" in body else body.get("messages")
    if prompt is None:
        raise ValueError("it has neither messages nor a prompt")
    return {"prompt_tokens": _prompt_tokens(prompt), "output_tokens": output}


def _usage(response: Any) -> Mapping[str, Any] | None:
    """What an answer took; None where there is no answer."""
    found = response
    for part in ("body", "usage"):
        found = found or {}
        if not isinstance(found, Mapping):
            raise ValueError("its response is not one of OpenAI's: a body with a usage is needed")
        found = found.get(part)
    if found and not isinstance(found, Mapping):
        raise ValueError("its usage is no object with prompt_tokens and completion_tokens")
    return found


def _prompt_tokens(prompt: Any) -> int:
    """Text is counted by its bytes; a list of numbers is tokens already."""
    if isinstance(prompt, str):
        return -(-len(prompt.encode()) // _BYTES_PER_TOKEN)
    if isinstance(prompt, list) and prompt and all(type(item) is int for item in prompt):
        return len(prompt)
    if isinstance(prompt, list):
        return sum(_prompt_tokens(item) for item in prompt)
    if isinstance(prompt, Mapping):  # a message, or a part of one
        return sum(_prompt_tokens(prompt.get(key, "")) for key in ("content", "text"))
    return 0

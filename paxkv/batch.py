"""A file of requests in, a file of results out: each exactly once, however often it is stopped.

Both are in OpenAI's batch format, a JSON object a line. A result is appended in one write when its
request ends, so a run that is killed leaves all results but those under way, and the next run
begins with what is missing.
"""

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from paxkv.finite import finite
from paxkv.llm import LLM
from paxkv.openai_format import Asked, error_body, read_body, write_body
from paxkv.request import Completion

_START = b'{"id": "batch_req_'  # of every result


class BatchRequest(NamedTuple):
    """A line of the file."""

    custom_id: str
    url: str
    body: dict[str, Any]


class Ended(NamedTuple):
    """A request whose result was written."""

    custom_id: str
    error: str | None  # why it was refused


def read_requests(path: Path) -> list[BatchRequest]:
    """The requests of a file.

    Raises:
        ValueError: A line is none, or two have one `custom_id`; the message names the line.
    """
    requests: dict[str, BatchRequest] = {}
    for where, line in _lines(path):
        request = _request(line, where)
        if request.custom_id in requests:
            raise ValueError(
                f"{where}: custom_id {request.custom_id!r} was there before: results could "
                "not be told apart"
            )
        requests[request.custom_id] = request
    if not requests:
        raise ValueError(f"{path} holds no request: write one JSON object per line")
    return list(requests.values())


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    yield f"{path}:{number}", json.loads(line)
                except (ValueError, RecursionError) as error:  # not JSON, or not UTF-8
                    raise ValueError(f"{path}:{number} is not JSON: {error}") from error


def _request(line: Any, where: str) -> BatchRequest:
    if not isinstance(line, dict):
        raise ValueError(f"{where} holds {line!r:.60}; a request is an object with a custom_id")
    custom_id, method, url, body = (line.get(x) for x in ("custom_id", "method", "url", "body"))
    if not isinstance(custom_id, str) or not _is_unicode(custom_id):
        raise ValueError(f"{where}: custom_id is {custom_id!r:.60}; it must be text of its own")
    if method != "POST":
        raise ValueError(f"{where}: method is {method!r:.60}; only 'POST' is served")
    if not isinstance(url, str) or not isinstance(body, dict):
        raise ValueError(f"{where}: url must be text and body an object, found {url!r:.60} and "
                         f"{body!r:.60}")  # fmt: skip
    return BatchRequest(custom_id, url, body)


def _is_unicode(text: str) -> bool:
    """Whether it is some text, and can be written: JSON may escape half a character."""
    return text.encode(errors="ignore").decode() == text != ""


class Results:
    """The file of results, which one process at a time may hold.

    Args:
        path: Made where there is none.

    Raises:
        ValueError: Another process holds it, or it is no file of results.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            _lock(self._file, path)
            # The custom_id of each result, and whether it says why there is no answer.
            self.done, end = _read_results(path)
            os.ftruncate(self._file, end)
            if end and os.pread(self._file, 1, end - 1) != b"\n":
                os.write(self._file, b"\n")  # another program left it out
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Lets go of the file."""
        os.close(self._file)

    def append(self, result: dict[str, Any]) -> None:
        """Adds a line, and returns when it is on disk."""
        line = json.dumps(finite(result), ensure_ascii=False, allow_nan=False) + "\n"
        data = line.encode(errors="replace")
        while data:  # a write may take a part
            data = data[os.write(self._file, data) :]
        os.fsync(self._file)
        self.done[result["custom_id"]] = _is_refusal(result)

    @property
    def num_refused(self) -> int:
        """How many results say why there is no answer, those of earlier runs too."""
        return sum(self.done.values())


def _is_refusal(result: dict[str, Any]) -> bool:
    return result["response"]["status_code"] != 200


def _lock(file: int, path: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise ValueError(f"{path} is being written by another process: wait for it") from None


def _read_results(path: Path) -> tuple[dict[str, bool], int]:
    """Whether every whole line is a refusal, by `custom_id`; and where they end, in bytes."""
    done, end = {}, 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n") and line.startswith(_START[: len(line)]):
                break  # the machine stopped in the middle of it
            try:
                result = json.loads(line)
                if not isinstance(result["custom_id"], str):
                    raise ValueError
                done[result["custom_id"]] = _is_refusal(result)
            except (ValueError, TypeError, KeyError, RecursionError):
                raise ValueError(
                    f"{path}:{number} is no result of a batch: name another file with --output"
                ) from None
            end += len(line)
    return done, end


def run_batch(
    llm: LLM, requests: list[BatchRequest], results: Results, *, model: str
) -> Iterator[Ended]:
    """Serves the requests that have no result yet, and writes their results as they end.

    Args:
        llm: What serves them.
        requests: Of `read_requests`.
        results: Where results are appended.
        model: The name that results give the model.

    Raises:
        ValueError: The file has results of other requests.
    """
    waiting = missing(requests, results)
    asked: list[tuple[BatchRequest, Asked]] = []
    for request in waiting:
        try:
            asked.append((request, read_body(llm, request.url, request.body)))
        except ValueError as error:
            yield _write(llm, request, str(error), results, model)
    completions = llm.as_completed([a.prompt for _, a in asked], [a.params for _, a in asked])
    with contextlib.closing(completions):
        for index, completion in completions:
            outcome = completion if completion.error is None else completion.error
            yield _write(llm, asked[index][0], outcome, results, model)


def missing(requests: list[BatchRequest], results: Results) -> list[BatchRequest]:
    """The requests that have no result yet.

    Raises:
        ValueError: The file has results of other requests.
    """
    if strange := results.done.keys() - {request.custom_id for request in requests}:
        raise ValueError(
            f"the file of results has {len(strange)} results of other requests, such as "
            f"{min(strange)!r}: name another with --output"
        )
    return [request for request in requests if request.custom_id not in results.done]


def _write(
    llm: LLM, request: BatchRequest, outcome: Completion | str, results: Results, model: str
) -> Ended:
    id = f"batch_req_{request.custom_id}"
    if isinstance(outcome, str):
        status, body, error = 400, error_body(outcome), outcome
    else:
        created = int(time.time())
        body = write_body(llm, request.url, outcome, id=id, model=model, created_seconds=created)
        status, error = 200, None
    results.append({
        "id": id,
        "custom_id": request.custom_id,
        "response": {"status_code": status, "request_id": id, "body": body},
        "error": None,
    })  # fmt: skip
    return Ended(request.custom_id, error)

"""Writes a conversation as the prompt that a chat model was trained on."""

import datetime
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Never

import jinja2.exceptions
import jinja2.nodes
import jinja2.parser
from jinja2 import ext, sandbox

MAX_CHARACTERS = 1 << 24  # of a rendered conversation


class _GenerationTag(ext.Extension):
    """Reads over `{% generation %}`, which marks what the model wrote for those who train on it."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(sandbox.ImmutableSandboxedEnvironment):
    """Templates come with models and are not to be trusted: they see values, not Python.

    Attributes that lead into Python, and changes to what was passed in, raise. A `range` has at
    most jinja2's 100,000 items and a text `MAX_CHARACTERS`. Not bounded: the time that loops within
    loops take, and the size of values on the way.
    """

    def __init__(self):
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _GenerationTag],
        )
        self.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        self.filters["tojson"] = _tojson  # jinja2's own writes for HTML

    def unsafe_undefined(self, obj: Any, attribute: str) -> Never:
        """Refuses what jinja2 would let pass as an undefined value until it is used."""
        kind = type(obj).__name__
        raise jinja2.exceptions.SecurityError(
            f"it reaches for {attribute!r} of a {kind}, which is not safe"
        )


def render_chat(
    template: str | None,
    messages: Sequence[Mapping[str, Any]],
    *,
    special_tokens: Mapping[str, str],
    add_generation_prompt: bool = True,
    **variables: Any,
) -> str:
    """The conversation as one text, as Hugging Face's `apply_chat_template` writes it.

    Encode it with `add_special_tokens=False`: the template has put them in. Special tokens that
    stand in a message's text count as such too.

    Args:
        template: The model's chat template (jinja2).
        messages: `{"role": ..., "content": ...}` each, in plain JSON types.
        special_tokens: A tokenizer's, by role; the template knows them as `bos_token` and so on.
        add_generation_prompt: Ends with what begins the model's answer.
        **variables: More that the template knows, such as `tools` or `enable_thinking`.

    Raises:
        ValueError: There is no template, the messages are none, or it fails or refuses them.
    """
    if template is None:
        raise ValueError(
            "the model has no chat template: give it a text to continue instead of messages, or a"
            " model that was trained for chat (their names often end in -Instruct or -Chat)"
        )
    _check_messages(messages)
    context = {"tools": None, "documents": None, **special_tokens, **variables}
    context |= {"messages": list(messages), "add_generation_prompt": add_generation_prompt}
    context = _plain(context)
    try:
        return _bounded(_Environment().from_string(template).generate(context))
    except jinja2.TemplateSyntaxError as error:
        message = f"the model's chat template is wrong in line {error.lineno}: {error}"
        raise ValueError(message) from error
    except RecursionError as error:
        raise ValueError("the model's chat template calls itself without end") from error
    except Exception as error:  # it runs code that is not ours, which may raise anything
        raise ValueError(f"the model's chat template failed: {error}") from error


def _check_messages(messages: object) -> None:
    """Templates read what is missing as empty, and ask the model something else in silence."""
    form = 'a conversation is a list of {"role": ..., "content": ...} messages'
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise ValueError(f"{form}, found {messages!r:.60}")
    if not messages:
        raise ValueError(f"{form}; found an empty list: at least one is needed to answer")
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"{form}; message {number} has no role: {message!r:.60}")
        if message.get("content") is None and not message.get("tool_calls"):
            raise ValueError(f"{form}; message {number} has no content: {message!r:.60}")


def _plain(context: dict[str, Any]) -> dict[str, Any]:
    """A copy in plain JSON types: methods of any other object would be open to the template."""
    try:
        return json.loads(json.dumps(context))
    except TypeError as error:
        raise ValueError(f"messages may hold JSON's types only: {error}") from error


def _bounded(pieces: Iterable[str]) -> str:
    kept, num_characters = [], 0
    for piece in pieces:
        kept.append(piece)
        num_characters += len(piece)
        if num_characters > MAX_CHARACTERS:
            raise ValueError(f"it wrote more than the {MAX_CHARACTERS} characters allowed")
    return "".join(kept)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )

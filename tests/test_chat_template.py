"""Conversations become the text that the model's template says, and templates stay in their box."""

import re
from typing import Any

import pytest

from paxkv.models import chat_template
from paxkv.models.chat_template import render_chat

CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + eos_token + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
MESSAGES = [{"role": "user", "content": "Hi"}]


def _render(template: str | None, messages: Any = MESSAGES, **variables):
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    return render_chat(template, messages, special_tokens=tokens, **variables)


def test_conversation_is_written_as_the_template_says():
    assert _render(CHATML) == "<|im_start|>user\nHi</s>\n<|im_start|>assistant\n"
    assert _render(CHATML, add_generation_prompt=False) == "<|im_start|>user\nHi</s>\n"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("  {% if true %}\nx\n{% endif %}\ny", "x\ny"),  # blocks leave no lines behind
        ("{% for i in range(9) %}{% if i > 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "012"),
        ("{{ messages | tojson }}", '[{"role": "user", "content": "Hi"}]'),
        ("{{ {'b': '<é>', 'a': 1} | tojson(indent=1) }}", '{\n "b": "<é>",\n "a": 1\n}'),
        ("{{ strftime_now('%%') }}", "%"),
        ("{{ bos_token }}{{ tools is none }}{{ missing is defined }}", "<s>TrueFalse"),
        ("{% set ns = namespace(n=0) %}{% set ns.n = 2 %}{{ ns.n }}", "2"),
        ("{{ colour }}", "red"),
        ("a{% generation %}{{ messages[0].content }}{% endgeneration %}b", "aHib"),
    ],
)
def test_template_finds_what_hugging_face_offers(template: str, expected: str):
    assert _render(template, colour="red") == expected


def test_refusal_by_the_template_is_passed_on():
    with pytest.raises(ValueError, match="failed: roles must alternate"):
        _render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% if %}", "wrong in line 1"),
        ("{{ messages[0].role.nothing.more }}", "failed"),
        ("{{ 1 / 0 }}", "failed: division by zero"),
        ("{{ messages[0].content | nosuchfilter }}", "wrong in line 1"),
        ("{% include 'other' %}", "failed"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "calls itself without end"),
    ],
)
def test_broken_template_says_so(template: str, message: str):
    with pytest.raises(ValueError, match=message):
        _render(template)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__ }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ ''['__class__']['__mro__'] }}",
        "{{ (''|attr('__class__')).__mro__ }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ raise_exception.__globals__ }}",
        "{{ raise_exception.__code__.co_code }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ self.__init__.__globals__ }}",
    ],
)
def test_template_cannot_leave_its_box(template: str):
    with pytest.raises(ValueError, match="failed"):
        _render(template)


def test_huge_loop_is_refused():
    with pytest.raises(ValueError, match="failed: Range too big"):
        _render("{% for i in range(1000000000) %}{% endfor %}")


def test_endless_text_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(chat_template, "MAX_CHARACTERS", 1000)
    loops = "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}"
    with pytest.raises(ValueError, match="more than the 1000 characters"):
        _render(loops)


def test_callers_messages_stay_as_they_were():
    messages: list[dict[str, object]] = [{"role": "user", "content": "Hi", "more": [1]}]
    _render("{% set m = messages[0] %}{{ m.more }}", messages)
    assert messages == [{"role": "user", "content": "Hi", "more": [1]}]


def test_messages_of_other_types_are_refused():
    with pytest.raises(ValueError, match=r"^messages may hold JSON"):
        _render(CHATML, [{"role": "user", "content": object()}])


@pytest.mark.parametrize(
    ("messages", "what"),
    [
        ("Hi", "found 'Hi'"),
        ({"role": "user", "content": "Hi"}, "found {'role'"),
        ([], "an empty list: at least one is needed"),
        (["Hi"], "message 0 has no role: 'Hi'"),
        ([MESSAGES[0], {"content": "Hi"}], "message 1 has no role"),
        ([{"role": "user"}], "message 0 has no content"),
        ([{"role": "user", "content": None}], "message 0 has no content"),
    ],
)
def test_what_is_no_conversation_is_refused(messages, what):
    with pytest.raises(ValueError, match=re.escape(what)) as error:
        _render(CHATML, messages)
    assert "a conversation is a list of" in str(error.value)


def test_message_of_tool_calls_needs_no_content():
    calls = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    assert _render("{{ messages[0].tool_calls[0].name }}", [calls]) == "f"


def test_model_without_template_says_what_to_do():
    with pytest.raises(ValueError, match=r"no chat template: give it a text.*-Instruct"):
        _render(None)

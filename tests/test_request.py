"""What SamplingParams takes, what it refuses, and how a model's settings fill it in."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from paxkv.request import SamplingParams


@dataclasses.dataclass(frozen=True)
class ModelSettings:
    """As much of a generation_config as matters here."""

    max_new_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


@pytest.mark.parametrize(
    ("name", "value", "needle"),
    [
        ("max_tokens", 0, "max_tokens=0 must be 1 or more"),
        ("temperature", -0.5, "temperature=-0.5 must be finite and 0 or more"),
        ("temperature", math.nan, "temperature=nan"),
        ("temperature", math.inf, "temperature=inf"),
        ("top_k", -2, "0 or -1 to keep every token"),
        ("top_p", 0.0, "set temperature=0"),
        ("top_p", 1.5, "at most 1"),
        ("top_p", math.nan, "top_p=nan"),
        ("min_p", -0.1, "from 0 to 1"),
        ("min_p", 1.1, "from 0 to 1"),
        ("min_tokens", -1, "0 or more"),
        ("n", 0, "n=0 must be from 1 to 65536"),
        ("n", 10**9, "n=1000000000 must be from 1 to 65536"),
        ("best_of", 0, "best_of=0 must be from 1 to 65536"),
        ("logprobs", 21, "from 0 to 20"),
        ("logprobs", -1, "from 0 to 20"),
        ("prompt_logprobs", 21, "from 0 to 20"),
        ("repetition_penalty", 0.0, "from 1e-06 to 1e+06"),
        ("repetition_penalty", 1e-50, "from 1e-06 to 1e+06"),
        ("temperature", 1e39, "float32"),
        ("presence_penalty", 2.5, "from -2 to 2"),
        ("frequency_penalty", -2.5, "from -2 to 2"),
        ("stop", "", "leave it out"),
        ("stop", ["a", ""], "leave it out"),
        ("stop_token_ids", [3, -1], "stop_token_ids item=-1"),
        ("logit_bias", {-1: 1.0}, "logit_bias id=-1"),
        ("logit_bias", {1: math.nan}, "logit_bias of 1=nan"),
        ("logit_bias", {1: math.inf}, "-inf to forbid"),
        ("logit_bias", {1: -1e39}, "float32"),
        ("temperature", 10**400, "float32"),
        ("logit_bias", {token: 1.0 for token in range(301)}, "names 301 tokens; at most 300"),
        ("logit_bias", [(1, 1.0), (1, 2.0)], "twice"),
    ],
)
def test_value_out_of_range_is_refused_with_what_is_allowed(name, value, needle):
    with pytest.raises(ValueError) as error:
        SamplingParams(**{name: value})
    assert needle in str(error.value)
    assert name in str(error.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", "5"),
        ("max_tokens", 5.0),
        ("max_tokens", True),
        ("temperature", "1"),
        ("temperature", True),
        ("temperature", 1j),
        ("top_k", 1.5),
        ("top_p", [0.5]),
        ("seed", "x"),
        ("n", None),
        ("n", 2.0),
        ("best_of", "3"),
        ("seed", 1.0),
        ("logprobs", True),
        ("presence_penalty", None),
        ("ignore_eos", 1),
        ("stop", 3),
        ("stop", [3]),
        ("stop", b"x"),
        ("stop", None),
        ("stop_token_ids", 3),
        ("stop_token_ids", "12"),
        ("stop_token_ids", [True]),
        ("logit_bias", {"5": 1.0}),
        ("logit_bias", {5: "1"}),
        ("logit_bias", [5]),
        ("logit_bias", ["ab"]),
        ("logit_bias", 5),
    ],
)
def test_value_of_the_wrong_kind_is_refused_by_name(name, value):
    with pytest.raises(TypeError, match=name):
        SamplingParams(**{name: value})


def test_edges_are_allowed():
    SamplingParams(
        max_tokens=1,
        temperature=0,
        top_k=-1,
        top_p=1,
        min_p=1,
        min_tokens=1,
        logprobs=20,
        prompt_logprobs=0,
        repetition_penalty=0.01,
        presence_penalty=-2,
        frequency_penalty=2,
        seed=-(2**70),
        logit_bias={token: -math.inf for token in range(299)} | {300: float(np.finfo("f4").min)},
    )


def test_lists_dicts_and_numpy_numbers_become_tuples_of_plain_numbers():
    loose: dict[str, Any] = {
        "stop": "###",
        "stop_token_ids": np.array([7, 8]),
        "logit_bias": {np.int64(5): np.float32(0.5), 6: -1},
        "max_tokens": np.int32(4),
        "temperature": np.float32(0.5),
    }
    given = SamplingParams(**loose)
    wanted = SamplingParams(
        stop=("###",),
        stop_token_ids=(7, 8),
        logit_bias=((5, 0.5), (6, -1.0)),
        max_tokens=4,
        temperature=0.5,
    )
    assert given == wanted
    assert hash(given) == hash(wanted)
    assert repr(given) == repr(wanted)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop=iter(["a", "b"])).stop == ("a", "b")
    assert SamplingParams(logit_bias=iter([(1, 2)])).logit_bias == ((1, 2.0),)


def test_min_tokens_above_max_tokens_is_refused():
    with pytest.raises(ValueError, match="min_tokens=300 must be at most max_tokens=299"):
        SamplingParams(min_tokens=300, max_tokens=299)
    open_params = SamplingParams(min_tokens=300)
    assert open_params.with_defaults(ModelSettings(max_new_tokens=300)).max_tokens == 300
    assert open_params.with_defaults(ModelSettings()).max_tokens == 300


def test_params_survive_replace():
    params = SamplingParams(stop="a", logit_bias={1: 2.0}, stop_token_ids=[3])
    assert dataclasses.replace(params) == params
    with pytest.raises(ValueError, match="top_p"):
        dataclasses.replace(params, top_p=2.0)


def test_defaults_come_from_the_caller_then_the_model_then_neutral():
    model = ModelSettings(temperature=0.6, top_p=0.9, max_new_tokens=40)
    settled = SamplingParams(temperature=0.0, seed=3, stop="x").with_defaults(model)
    assert (settled.temperature, settled.top_p) == (0.0, 0.9)  # a caller's 0 is not "left open"
    assert (settled.top_k, settled.min_p, settled.repetition_penalty) == (0, 0.0, 1.0)
    assert (settled.seed, settled.stop, settled.max_tokens) == (3, ("x",), 40)
    assert SamplingParams(max_tokens=5).with_defaults(model).max_tokens == 5
    neutral = SamplingParams().with_defaults(ModelSettings())
    assert (neutral.temperature, neutral.max_tokens) == (1.0, 256)
    assert neutral.is_settled and not SamplingParams(temperature=1.0).is_settled


def test_model_setting_out_of_range_is_refused():
    model = ModelSettings(top_p=7.0)
    with pytest.raises(ValueError, match=r"top_p=7\.0"):
        SamplingParams().with_defaults(model)

"""Models that would load and be computed wrongly, and so are refused."""

from collections.abc import Mapping
from typing import Any

# Settings that change the numbers, and the values at which they change nothing.
NEUTRAL_IN_HF: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "pretraining_tp": (1,),
    "attention_multiplier": (),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "embedding_multiplier": (1,),
    "residual_multiplier": (1,),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "quantization_config": (),
    "auto_map": (),  # code that the model brings along, which is never run
}
NEUTRAL_IN_GGUF: dict[str, tuple[Any, ...]] = {
    "attention.scale": (),
    "attention.sliding_window_pattern": (),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (1,),
    "expert_count": (0,),
    "final_logit_softcapping": (0,),
    "logit_scale": (1,),
    "residual_scale": (1,),
}


def check_neutral(settings: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]]) -> None:
    """Refuses a setting that has another value than a harmless one."""
    for name, harmless in neutral.items():
        value = settings.get(name)
        if value is not None and value not in harmless:
            raise ValueError(
                f"{name}={value!r} would change the numbers and is not supported"
                + (f"; supported is {harmless[0]!r}" if harmless else "")
            )

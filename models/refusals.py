"""Models that would load and be computed wrongly, and so are refused."""

from collections.abc import Mapping
from typing import Any

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM",)

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
    "attention.sliding_window": (0,),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (1,),
    "expert_count": (0,),
    "final_logit_softcapping": (0,),
    "logit_scale": (1,),
    "residual_scale": (1,),
}


def check_architecture(architectures: Any, model_type: Any) -> None:
    """Refuses an architecture that no decoder here computes."""
    named = architectures or ["LlamaForCausalLM" if model_type == "llama" else None]
    if named[0] not in SUPPORTED_ARCHITECTURES or model_type not in ("llama", None):
        raise ValueError(
            f"architecture {named[0]} (model_type {model_type!r}) is not supported; supported "
            f"are {', '.join(SUPPORTED_ARCHITECTURES)}"
        )


def check_neutral(settings: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]]) -> None:
    """Refuses a setting that has another value than a harmless one."""
    for name, harmless in neutral.items():
        value = settings.get(name)
        if value is not None and value not in harmless:
            raise ValueError(
                f"{name}={value!r} would change the numbers and is not supported"
                + (f"; supported is {harmless[0]!r}" if harmless else "")
            )


def check_full_attention(config: Mapping[str, Any]) -> None:
    """Refuses layers that see a window only."""
    windows = config.get("use_sliding_window", True) and config.get("sliding_window")
    layer_types = set(config.get("layer_types") or ()) - {"full_attention"}
    if windows or layer_types:
        raise ValueError(
            f"sliding_window={windows}, layer_types {sorted(layer_types)}: only full attention "
            "is supported"
        )

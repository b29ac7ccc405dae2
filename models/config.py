"""A decoder's sizes and settings, read from a Hugging Face config or GGUF metadata."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from paxkv.decoder import LayerGroup
from paxkv.models.families import family_of
from paxkv.models.layer_windows import FULL, SLIDING, LayerWindows, read_windows
from paxkv.models.refusals import NEUTRAL_IN_GGUF, NEUTRAL_IN_HF, check_neutral
from paxkv.models.rope import RopeConfig
from paxkv.models.settings import check_size, layer_count, optional, required, whole_share


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Everything static about a decoder. Hashable, so that it can be static under `jax.jit`."""

    vocab_size: int  # V
    hidden_size: int  # D
    intermediate_size: int  # F
    num_layers: int  # L
    num_heads: int  # N
    num_kv_heads: int  # K
    head_dim: int  # H
    rms_norm_eps: float
    rope: RopeConfig
    max_position: int  # tokens the model was trained to see at once
    tie_embeddings: bool = False  # the embeddings are also the head
    qkv_bias: bool = False
    out_bias: bool = False  # of the attention's output projection
    mlp_bias: bool = False
    window: int | None = None  # tokens that windowed layers see, the query itself counted
    windowed_layers: tuple[int, ...] = ()  # the others see all
    windowed_rope: RopeConfig | None = None  # of the windowed layers; None is `rope` for all

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if field.type is int:
                check_size(field.name, getattr(self, field.name))
        if not isinstance(self.rms_norm_eps, float) or not 0 < self.rms_norm_eps < 1:
            raise ValueError(f"rms_norm_eps={self.rms_norm_eps!r} must be between 0 and 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} must be a multiple of "
                f"num_kv_heads={self.num_kv_heads}: each KV head serves as many query heads"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even: RoPE turns pairs")
        self._check_windows()
        if self.rope.divisors and len(self.rope.divisors) != self.head_dim // 2:
            raise ValueError(
                f"{len(self.rope.divisors)} RoPE factors for {self.head_dim // 2} pairs of a head"
            )

    def _check_windows(self) -> None:
        if (self.window is None) != (not self.windowed_layers):
            raise ValueError(
                f"window={self.window} and windowed_layers={self.windowed_layers}: give both or "
                "neither"
            )
        if self.window is not None:
            check_size("window", self.window)
        if not set(self.windowed_layers) <= set(range(self.num_layers)):
            raise ValueError(
                f"windowed_layers={self.windowed_layers} must be of layers 0 to "
                f"{self.num_layers - 1}"
            )

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "DecoderConfig":
        """Reads a parsed `config.json`.

        Raises:
            ValueError: An unsupported architecture, a setting that is missing or that would
                change the numbers in a way this decoder does not compute.
        """
        family = family_of(config)
        check_neutral(config, NEUTRAL_IN_HF)
        settings = family.settings(config)
        num_heads = required(settings, "num_attention_heads")
        hidden_size = required(settings, "hidden_size")
        num_layers = layer_count(settings, "num_hidden_layers")
        windows = read_windows(config, family)
        rope, windowed_rope = _hf_ropes(settings, windows, num_layers)
        attention_bias = bool(settings.get("attention_bias"))
        return cls(
            vocab_size=required(settings, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=required(settings, "intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=optional(settings, "num_key_value_heads", num_heads),
            head_dim=settings.get("head_dim") or whole_share(hidden_size, num_heads),
            rms_norm_eps=optional(settings, "rms_norm_eps", 1e-6),
            rope=rope,
            max_position=optional(settings, "max_position_embeddings", 2048),
            tie_embeddings=bool(settings.get("tie_word_embeddings")),
            qkv_bias=attention_bias or family.has_qkv_bias,
            out_bias=attention_bias,
            mlp_bias=bool(settings.get("mlp_bias")),
            window=windows.window,
            windowed_layers=windows.layers,
            windowed_rope=windowed_rope,
        )

    @classmethod
    def from_gguf(
        cls,
        metadata: Mapping[str, Any],
        *,
        tensor_names: Collection[str],
        rope_divisors: tuple[float, ...] = (),
    ) -> "DecoderConfig":
        """Reads a GGUF file's metadata.

        Args:
            metadata: Keys as in the file, such as `llama.block_count`.
            tensor_names: The stored tensors by their Hugging Face names. GGUF has no flag for
                biases or a tied head: what is stored tells.
            rope_divisors: The file's `rope_freqs` tensor.

        Raises:
            ValueError: As `from_hf`.
        """
        architecture = metadata.get("general.architecture")
        if architecture != "llama":
            raise ValueError(
                f"GGUF architecture {architecture!r} is not supported; supported is 'llama'"
            )
        settings = {
            key.removeprefix("llama."): value
            for key, value in metadata.items()
            if key.startswith("llama.")
        }
        check_neutral(settings, NEUTRAL_IN_GGUF)
        num_heads = required(settings, "attention.head_count")
        hidden_size = required(settings, "embedding_length")
        head_dim = settings.get("attention.key_length") or whole_share(hidden_size, num_heads)
        for name in ("attention.value_length", "rope.dimension_count"):
            if settings.get(name, head_dim) != head_dim:
                raise ValueError(f"{name}={settings[name]} must equal the head size {head_dim}")
        num_layers = layer_count(settings, "block_count")
        window = settings.get("attention.sliding_window") or None
        vocab_size = settings.get("vocab_size") or len(required(metadata, "tokenizer.ggml.tokens"))
        return cls(
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=required(settings, "feed_forward_length"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=settings.get("attention.head_count_kv", num_heads),
            head_dim=head_dim,
            rms_norm_eps=required(settings, "attention.layer_norm_rms_epsilon"),
            rope=RopeConfig.from_gguf(settings, rope_divisors),
            max_position=required(settings, "context_length"),
            tie_embeddings="lm_head.weight" not in tensor_names,
            qkv_bias=any(name.endswith("q_proj.bias") for name in tensor_names),
            out_bias=any(name.endswith("o_proj.bias") for name in tensor_names),
            mlp_bias=any(name.endswith("up_proj.bias") for name in tensor_names),
            window=window,
            windowed_layers=tuple(range(num_layers)) if window else (),
        )

    @property
    def layer_groups(self) -> tuple[LayerGroup, ...]:
        """Layers that keep all tokens, and layers that keep a window: one group, or one each."""
        full = tuple(n for n in range(self.num_layers) if n not in self.windowed_layers)
        groups = ((full, None), (self.windowed_layers, self.window))
        return tuple(
            LayerGroup(
                layers=layers,
                num_kv_heads=self.num_kv_heads,
                head_dim=self.head_dim,
                window=window,
            )
            for layers, window in groups
            if layers
        )

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The rotation of each layer."""
        windowed = self.windowed_rope or self.rope
        return tuple(
            windowed if layer in self.windowed_layers else self.rope
            for layer in range(self.num_layers)
        )

    @property
    def num_parameters(self) -> int:
        """Numbers in the weights, a tied head counted once."""
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = self.hidden_size * 2 * (queries + keys)
        mlp = 3 * self.hidden_size * self.intermediate_size
        norms = 2 * self.hidden_size
        biases = self.qkv_bias * (queries + 2 * keys) + self.out_bias * self.hidden_size
        biases += self.mlp_bias * (2 * self.intermediate_size + self.hidden_size)
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        layers = self.num_layers * (attention + mlp + norms + biases)
        return embeddings + layers + self.hidden_size

    def weight_bytes(self, bytes_per_number: int) -> int:
        """Memory that the weights take in a dtype of this size."""
        return self.num_parameters * bytes_per_number

    def kv_bytes_per_token(self, bytes_per_number: int) -> int:
        """Memory that the keys and values of one token take, all layers together."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * bytes_per_number


def _hf_ropes(
    settings: Mapping[str, Any], windows: LayerWindows, num_layers: int
) -> tuple[RopeConfig, RopeConfig | None]:
    """The rotation of most layers, and another one of windowed layers if they have one."""
    if len(windows.layers) == num_layers:
        return RopeConfig.from_hf(settings, layer_type=SLIDING), None
    rope = RopeConfig.from_hf(settings, layer_type=FULL)
    if not windows.layers:
        return rope, None
    windowed = RopeConfig.from_hf(settings, layer_type=SLIDING)
    return rope, None if windowed == rope else windowed

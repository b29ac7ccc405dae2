"""How the memory of the devices is shared out, and what is left for keys and values."""

import dataclasses

from paxkv.diagnose.footprint import Footprint
from paxkv.diagnose.model_sizes import BITS, ModelSizes
from paxkv.memory import format_bytes, parse_bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Bytes on each of the devices, which hold equal parts of the model."""

    memory_bytes: int
    weight_bytes: int
    activation_bytes: int
    bytes_per_slot: float  # of keys and values, see `Footprint`
    footprint: Footprint
    num_devices: int = 1

    @property
    def kv_bytes(self) -> int:
        """What is left for keys and values."""
        return self.memory_bytes - self.weight_bytes - self.activation_bytes

    @property
    def num_slots(self) -> int:
        """Slots that fit in that, given that each device holds its part of every token."""
        return max(int(self.kv_bytes // self.bytes_per_slot), 0)

    @property
    def num_tokens(self) -> int:
        """Tokens that fit, if none has left a window."""
        return self.num_slots // self.footprint.shares

    @property
    def bytes_per_token(self) -> float:
        """Of a token that has left no window."""
        return self.bytes_per_slot * self.footprint.shares

    def request_bytes(self, num_tokens: float) -> float:
        """Keys and values of a sequence of so many tokens."""
        return self.bytes_per_slot * self.footprint.used(num_tokens)


def parse_weights(weights: str, sizes: ModelSizes) -> int:
    """Bytes of all weights: by their dtype, such as "bf16", or as a size, such as "26GiB".

    Raises:
        ValueError: It is neither.
    """
    if weights.lower() in BITS:
        return sizes.weight_bytes(weights.lower())
    if weights[:1].isdigit():
        return parse_bytes(weights)
    raise ValueError(
        f"weights {weights!r} is neither a dtype ({', '.join(BITS)}) nor a size such as 26GiB"
    )


def make_budget(
    sizes: ModelSizes,
    *,
    memory_bytes: int,
    weight_bytes: int,
    activation_bytes: int,
    kv_dtype: str,
    num_devices: int,
) -> Budget:
    """Shares out the memory.

    Args:
        sizes: The model's.
        memory_bytes: Of one device.
        weight_bytes: Of all weights, which the devices share evenly.
        activation_bytes: Kept free on each device for all else.
        kv_dtype: Of keys and values, one of `BITS`.
        num_devices: That the model is split over.

    Raises:
        ValueError: Nothing is left for keys and values; the message says what would help.
    """
    if kv_dtype not in BITS:
        raise ValueError(f"KV dtype {kv_dtype!r} is none of {', '.join(BITS)}")
    per_token = sizes.kv_bytes_per_token(kv_dtype, num_devices=num_devices)
    footprint = Footprint.of_layers(sizes.windows)
    budget = Budget(
        memory_bytes=memory_bytes,
        weight_bytes=-(-weight_bytes // num_devices),
        activation_bytes=activation_bytes,
        bytes_per_slot=per_token / footprint.shares,
        footprint=footprint,
        num_devices=num_devices,
    )
    if budget.num_tokens < 1:
        raise ValueError(_too_small(budget, weight_bytes))
    return budget


def _too_small(budget: Budget, weight_bytes: int) -> str:
    """Names the first remedies that leave something for keys and values."""
    usable = budget.memory_bytes - budget.activation_bytes
    told = (
        f"the weights take {format_bytes(budget.weight_bytes)} and activations "
        f"{format_bytes(budget.activation_bytes)} of {format_bytes(budget.memory_bytes)}, which "
        "leaves nothing for keys and values: look at the model, not at its cache. "
    )
    helpful = []
    for part, name in ((2, "half as many bits a weight"), (4, "a quarter of the bits")):
        left = usable - budget.weight_bytes // part
        if left > 0:
            helpful.append(f"{name} leave {format_bytes(left)}")
    if usable > 0:
        devices = weight_bytes // usable + 1
        left = usable - weight_bytes / devices
        helpful.append(f"{devices} such devices leave {format_bytes(left)} on each")
    if not helpful:
        return told + "This memory is too small for it in any form: name another device or model"
    return told + "; ".join(helpful)

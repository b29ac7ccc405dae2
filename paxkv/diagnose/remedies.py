"""What else could be changed about the memory, and by how much each change would help."""

import dataclasses

from paxkv.diagnose.budget import Budget
from paxkv.diagnose.model_sizes import ModelSizes

_FEW_KV_HEADS = 8  # what most models with grouped heads have


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """A change, and what it multiplies."""

    name: str
    requests: float  # requests that run at once, where memory limits them
    speed: float  # decode steps per second, which take as long as reading weights and tokens does


def possible_remedies(budget: Budget, sizes: ModelSizes, *, used_slots: float) -> list[Remedy]:
    """Changes to the model and to its cache, estimated from bytes.

    Requests at once are taken to grow with the tokens that fit, and a decode step to last as long
    as its reads: all weights and all tokens in the cache.

    Args:
        budget: What is used now.
        sizes: The model's.
        used_slots: In the cache, on average.
    """
    changes = [
        ("weights in half the bits", 0.5, 1.0),
        ("weights in a quarter of the bits", 0.25, 1.0),
        ("keys and values in half the bits", 1.0, 0.5),
        ("a model of half the size", 0.5, 0.5),
    ]
    if sizes.num_kv_heads > _FEW_KV_HEADS:
        name = f"{_FEW_KV_HEADS} KV heads, not {sizes.num_kv_heads} (another model)"
        changes.insert(3, (name, 1.0, _FEW_KV_HEADS / sizes.num_kv_heads))
    remedies = [
        _remedy(name, budget, used_slots, weights=weights, tokens=tokens)
        for name, weights, tokens in changes
    ]
    return [*remedies, _twice_the_devices(budget, used_slots)]


def _remedy(
    name: str, budget: Budget, used_slots: float, *, weights: float, tokens: float
) -> Remedy:
    """The effect of weights and tokens that take such parts of their bytes."""
    changed = dataclasses.replace(
        budget,
        weight_bytes=int(budget.weight_bytes * weights),
        bytes_per_slot=budget.bytes_per_slot * tokens,
    )
    return Remedy(
        name=name,
        requests=changed.num_slots / budget.num_slots,
        speed=_read_bytes(budget, used_slots) / _read_bytes(changed, used_slots),
    )


def _twice_the_devices(budget: Budget, used_slots: float) -> Remedy:
    halved = _remedy("", budget, used_slots, weights=0.5, tokens=0.5)
    return dataclasses.replace(halved, name=f"{2 * budget.num_devices} devices")


def _read_bytes(budget: Budget, used_slots: float) -> float:
    return budget.weight_bytes + used_slots * budget.bytes_per_slot

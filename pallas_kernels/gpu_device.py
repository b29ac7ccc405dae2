"""The GPU that a kernel is traced for."""

from typing import Any, NamedTuple

import jax


class Gpu(NamedTuple):
    """What a kernel wants to know of its GPU."""

    compute_capability: tuple[int, int]
    num_multiprocessors: int
    interpret: bool = False  # on a CPU, in its place

    @property
    def has_tma(self) -> bool:
        """Whether it copies in the background, signalling barriers; before, threads copy."""
        return self.compute_capability >= (9, 0)


_H100 = Gpu((9, 0), 132)  # Mosaic, too, compiles for Hopper where it finds no GPU


def gpu_traced_for(*, interpret: bool = False) -> Gpu:
    """The default device if that is a GPU, else this machine's first one, else an H100.

    Args:
        interpret: The kernel is to run on a CPU, where its programs take turns: it is traced for
            Hopper with few multiprocessors, whatever GPU there is.
    """
    if interpret:
        return _H100._replace(num_multiprocessors=4, interpret=True)
    device = _find_device()
    if device is None:
        return _H100
    major, minor = str(device.compute_capability).split(".")
    return Gpu((int(major), int(minor)), getattr(device, "core_count", _H100.num_multiprocessors))


def _find_device() -> Any:
    device = jax.config.jax_default_device
    if getattr(device, "platform", None) in ("gpu", "cuda"):  # it may be None or a platform's name
        return device
    try:
        return jax.local_devices(backend="cuda")[0]
    except RuntimeError:  # no such backend
        return None

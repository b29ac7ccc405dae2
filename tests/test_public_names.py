"""What `import paxkv` gives, and that the README speaks of all of it."""

import re
from pathlib import Path

import jax
import pytest

import paxkv
from paxkv.compilation_cache import use_compilation_cache

README = (Path(__file__).parent.parent / "README.md").read_text("utf-8")


@pytest.mark.parametrize("name", paxkv.__all__)
def test_public_name_exists_and_stands_in_the_readme(name):
    assert getattr(paxkv, name) is not None
    assert re.search(rf"`(paxkv\.)?{name}`", README), f"the README does not explain {name}"


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = paxkv.no_such_name


@pytest.fixture
def cache_settings(monkeypatch, tmp_path):
    """Lets a test turn the compilation cache on, and puts everything back."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    monkeypatch.delenv("PAXKV_COMPILATION_CACHE", raising=False)
    monkeypatch.setattr("platformdirs.user_cache_path", lambda name: tmp_path / name)
    jax.config.update("jax_compilation_cache_dir", None)
    yield tmp_path / "paxkv" / "compiled"
    for name, value in before.items():
        jax.config.update(name, value)


def test_compilation_cache_is_in_the_users_cache_folder(cache_settings):
    use_compilation_cache()
    assert jax.config.jax_compilation_cache_dir == str(cache_settings)


def test_compilation_cache_can_be_switched_off(cache_settings, monkeypatch):
    monkeypatch.setenv("PAXKV_COMPILATION_CACHE", "0")
    use_compilation_cache()
    assert jax.config.jax_compilation_cache_dir is None


def test_compilation_cache_that_was_configured_is_left_alone(cache_settings):
    jax.config.update("jax_compilation_cache_dir", "elsewhere")
    use_compilation_cache()
    assert jax.config.jax_compilation_cache_dir == "elsewhere"

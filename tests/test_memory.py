import jax
import psutil
import pytest

from paxkv.memory import format_bytes, free_bytes, parse_bytes


@pytest.mark.parametrize(
    ("size", "num_bytes"),
    [
        (2000000, 2000000),
        ("2000000", 2000000),
        ("1B", 1),
        ("2kB", 2000),
        ("512MiB", 512 * 2**20),
        ("512 mib", 512 * 2**20),
        (" 2GB ", 2 * 10**9),
        ("2.5GiB", 5 * 2**29),
        (".5 KiB", 512),
        ("1TiB", 2**40),
        ("1TB", 10**12),
    ],
)
def test_sizes_are_read_as_people_write_them(size, num_bytes):
    assert parse_bytes(size) == num_bytes


@pytest.mark.parametrize(
    "size", ["", "much", "0", 0, -1, "-2GB", "2 GBs", "2G", "1e9", "1,5GB", "GB", "1.2.3MB", "nan"]
)
def test_what_is_no_size_is_refused_with_an_example(size):
    with pytest.raises(ValueError, match=r"is not a memory size: .* such as 512MiB"):
        parse_bytes(size)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (46080, "45.0 KiB"), (5 * 2**29, "2.5 GiB")],
)
def test_sizes_are_written_for_people(num_bytes, text):
    assert format_bytes(num_bytes) == text


def test_free_memory_is_the_hosts_where_the_device_is_a_cpu():
    assert jax.devices()[0].platform == "cpu"
    assert 0 < free_bytes() <= psutil.virtual_memory().total


def test_free_memory_is_the_devices_where_it_has_its_own(monkeypatch):
    class Device:
        platform = "gpu"

        def memory_stats(self):
            return {"bytes_limit": 1000, "bytes_in_use": 300}

    monkeypatch.setattr(jax, "devices", lambda: [Device()])
    assert free_bytes() == 700

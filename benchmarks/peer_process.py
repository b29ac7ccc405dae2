"""Runs what paxkv is compared with: scripts in interpreters of their own."""

import dataclasses
import json
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

PEER_PYTHONS = {  # the variable that names an interpreter which has the peer
    "transformers": "PAXKV_REFERENCE_PYTHON",
    "llama.cpp": "PAXKV_LLAMA_CPP_PYTHON",
}


def named_peers() -> list[str]:
    """Those whose interpreter is named."""
    return [name for name, variable in PEER_PYTHONS.items() if os.environ.get(variable)]


def run_peer(name: str, task: str, case: "DataclassInstance") -> dict[str, Any]:
    """Runs `peers/NAME_TASK.py` on a case and waits for its figures."""
    script = Path(__file__).parent / "peers" / f"{name.replace('.', '_')}_{task}.py"
    command = [os.environ[PEER_PYTHONS[name]], str(script)]
    result = subprocess.run(
        command,
        input=json.dumps(dataclasses.asdict(case)),
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        raise RuntimeError(f"{name} failed in {' '.join(command)}:\n{result.stderr}")
    return json.loads(result.stdout.splitlines()[-1])

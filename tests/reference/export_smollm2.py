"""Exports a GGUF file of the llama architecture as a float32 Hugging Face folder.

Run it with an interpreter that has torch and transformers; the conversion is transformers' own,
so that it checks ours:

    $PAXKV_REFERENCE_PYTHON tests/reference/export_smollm2.py MODEL.gguf FOLDER
"""

import argparse
import sys
import tempfile
from pathlib import Path


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="GGUF file to float32 Hugging Face folder")
    parser.add_argument("gguf", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--packages",
        type=Path,
        help="site-packages to borrow the gguf package from, where this interpreter has none",
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as borrowed:
        if args.packages:
            for found in args.packages.glob("gguf*"):  # nothing else: it is for another Python
                Path(borrowed, found.name).symlink_to(found.resolve())
            sys.path.append(borrowed)
        export(args.gguf, args.folder)


def export(gguf: Path, folder: Path) -> None:
    """Writes config, generation config, weights and tokenizer."""
    import torch  # pyright: ignore[reportMissingImports]
    from transformers import (  # pyright: ignore[reportMissingImports]
        AutoModelForCausalLM,
        AutoTokenizer,
    )

    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # A model read from GGUF counts as quantised and refuses to be saved; its copy does not.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    plain = type(model)(model.config)
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


if __name__ == "__main__":
    main()

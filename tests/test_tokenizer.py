"""Tokenizers of folders and GGUF files give the ids that the models were trained with."""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest

from helpers_text import SENTENCEPIECE_WORDS, byte_level_tokenizer, sentencepiece_tokenizer
from paxkv.models import tokenizer as tokenizer_module
from paxkv.models.bundled import bundled_model_path
from paxkv.models.tokenizer import Tokenizer

CASES_FILE = Path(__file__).parent / "data" / "smollm2_tokenizer.json"


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    file = bundled_model_path()
    if file is None:
        pytest.skip("the weights of the dependency group `model` are not installed")
    fields = gguf.GGUFReader(file).fields
    return Tokenizer.from_gguf({name: field.contents() for name, field in fields.items()})


def _byte_level_metadata(**changes: Any) -> dict[str, Any]:
    """Ten digits, three letters, a space, and words with special ones among them."""
    tokens = [*"0123456789abc", "\u0120", "ab", "abc", "<s>", "</s>", "<think>", "\u0120a"]
    kinds = [{"<s>": 3, "</s>": 3, "<think>": 4}.get(token, 1) for token in tokens]
    metadata = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": kinds,
        "merges": ["a b", "\u0120 a"],
        "bos_token_id": tokens.index("<s>"),
        "eos_token_id": tokens.index("</s>"),
    } | changes
    return {f"tokenizer.ggml.{key}": value for key, value in metadata.items() if value is not None}


def _sentencepiece_metadata(**changes: Any) -> dict[str, Any]:
    """Byte tokens, letters, and words whose scores say in which order they are made."""
    scores = {"\u2581": -9.0, "a": -9.0, "b": -9.0, "c": -9.0}
    scores |= {"ab": -2.0, "bc": -1.0, "abc": -5.0, "\u2581a": -4.0}
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *scores]
    metadata = {
        "model": "llama",
        "tokens": tokens,
        "scores": [0.0] * 259 + [*scores.values()],
        "token_type": [2, 3, 3] + [6] * 256 + [1] * len(scores),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    } | changes
    return {f"tokenizer.ggml.{key}": value for key, value in metadata.items() if value is not None}


def _tokens(tokenizer: Tokenizer, text: str) -> list[str | None]:
    return [tokenizer.backend.id_to_token(token_id) for token_id in tokenizer.encode(text)]


def test_smollm2_gives_the_ids_of_transformers(smollm2: Tokenizer):
    for case in json.loads(CASES_FILE.read_text()):
        assert smollm2.encode(case["text"]) == case["ids"], case["text"]
        assert smollm2.decode(case["ids"]) == case["decoded"], case["text"]


def test_smollm2_knows_its_special_tokens(smollm2: Tokenizer):
    assert (smollm2.vocab_size, smollm2.bos_id, smollm2.eos_id) == (49152, 1, 2)
    assert smollm2.encode("a<|im_end|>b")[1] == smollm2.eos_id
    assert smollm2.decode([2]) == ""
    assert smollm2.decode([2], skip_special_tokens=False) == "<|im_end|>"
    assert smollm2.chat_template is not None


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "a  12", ["a", "\u0120", "\u0120", "1", "2"]),
        ("smollm", "ab 1 a", ["ab", "\u0120", "1", "\u0120a"]),
        ("qwen2", "ab 12", ["ab", "\u0120", "1", "2"]),
        ("llama-bpe", "abc 12", ["<s>", "abc", "\u0120", "1", "2"]),
    ],
)
def test_byte_level_gguf_follows_its_pre_tokenizer(pre: str, text: str, expected: list[str]):
    assert _tokens(Tokenizer.from_gguf(_byte_level_metadata(pre=pre)), text) == expected


def test_gguf_flags_say_what_stands_around_a_text():
    tokenizer = Tokenizer.from_gguf(_byte_level_metadata(add_bos_token=True, add_eos_token=True))
    assert _tokens(tokenizer, "a") == ["<s>", "a", "</s>"]
    assert tokenizer.encode("a", add_special_tokens=False) == [10]
    tokenizer = Tokenizer.from_gguf(_byte_level_metadata(pre="llama-bpe", add_bos_token=False))
    assert _tokens(tokenizer, "a") == ["a"]


def test_user_defined_token_is_kept_whole_and_shown():
    tokenizer = Tokenizer.from_gguf(_byte_level_metadata())
    assert _tokens(tokenizer, "a<think>b") == ["a", "<think>", "b"]
    assert tokenizer.decode(tokenizer.encode("a<think>b</s>")) == "a<think>b"


def test_sentencepiece_gguf_merges_the_best_score_first():
    tokenizer = Tokenizer.from_gguf(_sentencepiece_metadata())
    assert _tokens(tokenizer, "abc") == ["<s>", "\u2581a", "bc"]
    assert _tokens(tokenizer, "babc\n") == ["<s>", "\u2581", "b", "abc", "<0x0A>"]
    assert tokenizer.decode(tokenizer.encode("ab \u00e9\nc")) == "ab \u00e9\nc"


def test_sentencepiece_gguf_without_prefix_adds_no_space():
    tokenizer = Tokenizer.from_gguf(_sentencepiece_metadata(add_space_prefix=False))
    assert _tokens(tokenizer, "abc") == ["<s>", "abc"]
    assert tokenizer.decode(tokenizer.encode(" abc")) == " abc"


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (_byte_level_metadata(pre="klingon"), "pre is 'klingon'; understood are 'gpt-2'"),
        (_byte_level_metadata(model="bert"), "model is 'bert'; understood are 'gpt2'"),
        (_byte_level_metadata(merges=None), "no tokenizer.ggml.merges"),
        (_byte_level_metadata(eos_token_id=99), "eos_token is 99, but it has 20 tokens"),
        (_byte_level_metadata(tokens=["a"] * 20), "names 19 tokens more than once"),
        (_byte_level_metadata(merges=["a z"]), "tokens and merges do not fit: .*`z`"),
        (_byte_level_metadata(token_type=[1]), "1 token types for 20 tokens"),
        (_sentencepiece_metadata(scores=[0.0]), "1 scores for 267 tokens"),
    ],
)
def test_gguf_that_is_not_understood_is_refused(metadata: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_gguf(metadata)


def _write_folder(folder: Path, tokenizer: Tokenizer, **files: Any) -> Path:
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_folder_gives_ids_and_names(tmp_path: Path):
    source = byte_level_tokenizer()
    config = {"eos_token": {"content": "</s>"}, "bos_token": "<s>", "chat_template": "x"}
    tokenizer = Tokenizer.from_folder(_write_folder(tmp_path, source, tokenizer_config=config))
    assert tokenizer.encode("hello") == source.encode("hello")
    assert (tokenizer.bos_id, tokenizer.eos_id) == (256, 257)
    assert tokenizer.chat_template == "x"
    assert tokenizer.vocab_size == source.vocab_size


def test_folder_flags_say_what_stands_around_a_text(tmp_path: Path):
    config = {"eos_token": "</s>", "bos_token": "<s>", "add_bos_token": True}
    _write_folder(tmp_path, sentencepiece_tokenizer(), tokenizer_config=config)
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode("a")[0] == tokenizer.bos_id
    assert tokenizer.decode(tokenizer.encode("ab")) == "ab"


def test_folder_never_cuts_or_pads(tmp_path: Path):
    source = byte_level_tokenizer()
    source.backend.enable_truncation(2)
    source.backend.enable_padding(length=64)
    tokenizer = Tokenizer.from_folder(_write_folder(tmp_path, source))
    assert len(tokenizer.encode("hello")) == 5


def test_folder_names_tokens_in_the_special_tokens_map(tmp_path: Path):
    _write_folder(tmp_path, byte_level_tokenizer(), special_tokens_map={"eos_token": "</s>"})
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (None, 257)
    assert tokenizer.chat_template is None


def test_folder_template_file_goes_before_the_settings(tmp_path: Path):
    named = [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]
    folder = _write_folder(
        tmp_path, byte_level_tokenizer(), tokenizer_config={"chat_template": named}
    )
    assert Tokenizer.from_folder(folder).chat_template == "d"
    (folder / "chat_template.json").write_text('{"chat_template": "j"}')
    assert Tokenizer.from_folder(folder).chat_template == "j"
    (folder / "chat_template.jinja").write_text("file")
    assert Tokenizer.from_folder(folder).chat_template == "file"


def test_folder_without_tokenizer_json_is_refused(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match=r"SentencePiece.*save_pretrained"):
        Tokenizer.from_folder(tmp_path)


def test_folder_with_broken_files_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer"):
        Tokenizer.from_folder(tmp_path)
    _write_folder(tmp_path, byte_level_tokenizer(), tokenizer_config=[])
    with pytest.raises(ValueError, match="holds a list, not an object"):
        Tokenizer.from_folder(tmp_path)
    monkeypatch.setattr(tokenizer_module, "MAX_FILE_BYTES", 10)
    with pytest.raises(ValueError, match="more than the 10 allowed"):
        Tokenizer.from_folder(tmp_path)


def test_decoder_that_cannot_be_streamed_is_refused():
    backend = byte_level_tokenizer().backend
    backend.decoder = None  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ValueError, match=r"decoder is \[None\]; supported are"):
        Tokenizer.create(backend, {})


def test_marks_and_byte_names_in_text_survive():
    tokenizer = sentencepiece_tokenizer()
    assert SENTENCEPIECE_WORDS[0] == "\u2581"
    assert tokenizer.decode(tokenizer.encode("a b")) == "a b"

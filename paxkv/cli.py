"""The command `paxkv`."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import MofNCompleteColumn

import paxkv
from paxkv.cli_batch import batch
from paxkv.cli_common import (
    Dtype,
    KVMemory,
    MaxLength,
    MaxSlots,
    MemoryShare,
    MemoryTraceFile,
    Model,
    PageSize,
    Refused,
    errors_told,
    load_llm,
    notes,
    opened_trace,
    progress_bar,
    summary,
)
from paxkv.cli_diagnose import diagnose
from paxkv.finite import finite
from paxkv.request import Completion, SamplingParams

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    help="Generate text from a paged KV cache in JAX.",
    epilog='Start with: paxkv generate "Why do operating systems use pages?"',
)
app.command()(batch)
app.command()(errors_told()(diagnose))


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    if version:
        print(f"paxkv {paxkv.__version__}")
        raise typer.Exit


@app.command()
def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="What to answer or continue.", show_default=False)
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            help="One prompt per line, instead of PROMPT; - reads standard input.",
            show_default=False,
        ),
    ] = None,
    model: Model = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Ask in the model's chat format, or continue the text as it is. "
            "(default: chat, where the model has a chat format)",
            show_default=False,
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(help="New tokens at most, of each prompt. (default: the model's, else 256)"),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(help="0 takes the most likely token. (default: the model's, else 1)"),
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Sample from the k likeliest tokens.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Sample from the likeliest tokens of this mass.")
    ] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Drop tokens below this share of the likeliest one.")
    ] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Above 1, tokens that stand there already are less likely.")
    ] = None,
    presence_penalty: Annotated[
        float, typer.Option(help="Taken off the logit of each token of the answer so far.")
    ] = 0.0,
    frequency_penalty: Annotated[
        float, typer.Option(help="The same, once for each time the token stands there.")
    ] = 0.0,
    min_tokens: Annotated[int, typer.Option(help="No end of text before so many tokens.")] = 0,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on past the model's end of text.")
    ] = False,
    stop: Annotated[
        list[str] | None, typer.Option(help="End before this text. May be given several times.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same text.")] = None,
    n: Annotated[int, typer.Option("--n", help="Samples of each prompt.")] = 1,
    logprobs: Annotated[
        int | None,
        typer.Option(
            help="With --json: log-probabilities of each new token and of so many likeliest ones; "
            "null for minus infinity."
        ),
    ] = None,
    dtype: Dtype = "bfloat16",
    kv_memory: KVMemory = None,
    memory_share: MemoryShare = 0.5,
    page_size: PageSize = 16,
    max_slots: MaxSlots = 32,
    max_length: MaxLength = None,
    memory_trace: MemoryTraceFile = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per prompt instead of text.")
    ] = False,
) -> None:
    """Answer a prompt, or each line of a file.

    One prompt is streamed; many, or several samples, are served together,
    with a progress bar.
    Ctrl-C keeps what is done and ends after the step under way, which may
    be compiling; pressed again, it waits no longer. The text goes to
    standard output, everything else to standard error. The exit status is 1
    if a prompt could not be served, the others being there.

    Examples:
        paxkv generate "Why do operating systems use pages?"
        paxkv generate --raw "Once upon a time" --temperature 0.8 --seed 1
        paxkv generate --file questions.txt --json > answers.jsonl
    """
    if (prompt is None) == (file is None):
        raise Refused("give either a PROMPT or --file, a file with one prompt per line")
    if logprobs is not None and not as_json:
        raise Refused("--logprobs has no place in text: add --json")
    with errors_told(), opened_trace(memory_trace, model) as trace:
        prompts = [prompt] if prompt is not None else _lines(file)
        params = SamplingParams(
            max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
            repetition_penalty=repetition_penalty, presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty, min_tokens=min_tokens, ignore_eos=ignore_eos,
            stop=stop or (), seed=seed, n=n, logprobs=logprobs,
        )  # fmt: skip
        llm = load_llm(
            model, dtype=dtype, kv_memory=kv_memory, memory_share=memory_share,
            page_size=page_size, max_length=max_length,
            max_slots=min(max_slots, len(prompts) * n), memory_trace=trace,
        )  # fmt: skip
        if chat or (chat is None and llm.tokenizer and llm.tokenizer.chat_template):
            prompts = [llm.chat_prompt([{"role": "user", "content": text}]) for text in prompts]
        try:
            if len(prompts) == n == 1:
                all_served = _stream(llm, prompts[0], params, as_json=as_json)
            else:
                all_served = _many(llm, prompts, params, as_json=as_json)
        except KeyboardInterrupt:
            notes.print("\nstopped; what was done stands above")
            raise typer.Exit(130) from None
        finally:
            notes.print(summary(llm), style="dim", soft_wrap=True)
        if not all_served:
            raise typer.Exit(1)


@app.command()
def info(
    model: Model = None,
    dtype: Dtype = "bfloat16",
    kv_memory: Annotated[
        str | None,
        typer.Option(
            help='Memory for keys and values, like "512MiB" or "2GB". '
            "(default: all that is free, less the weights)",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Show what a model needs: weights, bytes per token, and what fits in the memory there is."""
    from paxkv.info import print_info

    with errors_told():
        print_info(model, dtype=dtype, kv_memory=kv_memory)


def main() -> None:
    """The entry point of the command `paxkv`."""
    app()


def _lines(file: Path | None) -> list[str]:
    assert file is not None
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text("utf-8-sig")
        prompts = [line for line in text.split("\n") if line.strip()]
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text: {error}") from error
    if not prompts:
        raise ValueError(f"{file} holds no prompt: write one per line")
    return prompts


def _stream(llm: "paxkv.LLM", prompt, params: SamplingParams, *, as_json: bool) -> bool:
    """Prints one completion as it grows; whether it was served."""
    completion = None
    try:
        for piece in llm.stream(prompt, params):
            completion = piece.completion
            if not as_json:
                print(piece.text, end="", flush=True)
    except ValueError:  # it cannot be served, which a completion can say as well
        [completion] = llm.generate([prompt], params)
    assert completion is not None
    print(_as_json(0, completion) if as_json else "", flush=True)
    _tell_error(0, completion)
    return completion.error is None


def _many(llm: "paxkv.LLM", prompts, params: SamplingParams, *, as_json: bool) -> bool:
    """Prints completions in the order of their prompts, as soon as those before are there.

    Returns:
        Whether all were served.
    """
    done: dict[int, Completion] = {}
    next_index = 0
    all_served = True
    with progress_bar(MofNCompleteColumn()) as progress:
        task = progress.add_task("generating", total=len(prompts))
        try:
            for index, completion in llm.as_completed(prompts, params):
                done[index] = completion
                all_served &= completion.error is None
                progress.advance(task)
                while next_index in done:
                    _print_one(next_index, done.pop(next_index), as_json=as_json)
                    next_index += 1
        except KeyboardInterrupt:
            for index, completion in sorted(done.items()):
                _print_one(index, completion, as_json=as_json)
            raise
    return all_served


def _print_one(index: int, completion: Completion, *, as_json: bool) -> None:
    if as_json:
        print(_as_json(index, completion), flush=True)
    elif len(completion.samples) <= 1:
        print(f"[{index + 1}] {completion.text}", flush=True)
    else:
        for number, sample in enumerate(completion.samples, 1):
            print(f"[{index + 1}.{number}] {sample.text}", flush=True)
    _tell_error(index, completion)


def _tell_error(index: int, completion: Completion) -> None:
    if completion.error:
        notes.print(
            f"prompt {index + 1} was not served: {completion.error}", style="red", soft_wrap=True
        )


def _as_json(index: int, completion: Completion) -> str:
    fields = {"index": index, **_fields(completion)}
    if len(completion.samples) > 1:
        fields["samples"] = [_fields(sample) for sample in completion.samples]
    return json.dumps(finite(fields), ensure_ascii=False, allow_nan=False)


def _fields(completion: Completion) -> dict[str, Any]:
    alone = dataclasses.replace(completion, samples=[])
    return {k: v for k, v in dataclasses.asdict(alone).items() if k not in ("samples", "score")}


if __name__ == "__main__":
    sys.exit(main())

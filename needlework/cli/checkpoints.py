"""The commands that read a checkpoint's folder: eval, generate."""

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .app import CorpusPaths, app, console, errors
from .suites import measure_suites
from .tables import scores

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer
    from torch import Tensor

    from needlework.models import NeedleworkForCausalLM

LEAST = 1e-4  # a temperature below it takes logits out of float32's range


@app.command("eval")
def evaluate(
    source: Annotated[
        str,
        typer.Argument(
            metavar="CHECKPOINT",
            help="A folder that `train` or `compare` wrote; with --suite any causal model's, or a Hub name.",
        ),
    ],
    corpus: CorpusPaths = None,
    length: Annotated[list[int] | None, typer.Option(help="A length in tokens; give it again for more.", min=1)] = None,
    task: Annotated[list[str] | None, typer.Option(help="A task; give it again for more. Default: needle, needles.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    suite: Annotated[
        list[str] | None, typer.Option(help="A suite by name; give it again for more. Needs the extra `eval`.")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="A suite's data sets, OWNER/NAME/ as on the Hub, before the Hub.")] = None,
    limit: Annotated[int | None, typer.Option(help="Only the first documents of each task of a suite.", min=1)] = None,
    full_context: Annotated[bool, typer.Option("--full-context", help="A suite without the model's training windows.")] = False,
    to: Annotated[Path, typer.Option(help="The folder of suites' results.")] = Path("runs/eval"),
) -> None:
    """Measure a checkpoint: loss on held-out text and retrieval at each length. Stopped by Ctrl-C, the same command goes on.

    Tasks: needle, needles (four at once), needles-2, needles-8, passkey, number, uuid, multikey, induction.

    Suites, with tasks of their own: zeroshot-ccq, zeroshot-carve, zeroshot-lucid, zeroshot-qdelta, ruler, mniah, induction, perplexity,
    recall, longbench, babilong, infinitebench. docs/evaluation.md says what each needs.
    """
    if suite:
        measure_suites(
            source, suite, corpus=corpus, lengths=tuple(sorted(set(length or ()))), tasks=tuple(task or ()), data=data, limit=limit,
            full_context=full_context, to=to, as_json=as_json,
        )  # fmt: skip
        return
    for option, value in (("--data", data), ("--limit", limit), ("--full-context", full_context)):
        if value:
            raise ValueError(f"{option} is a suite's: give --suite too")
    checkpoint = Path(source)
    from needlework.data import CorpusConfig, load_corpus, text_read
    from needlework.experiment.evaluate import Evaluation, check_measurement, measure
    from needlework.experiment.pieces import Pieces, measurement
    from needlework.experiment.recipe import OWN_TEXT
    from needlework.experiment.runner import state_bytes
    from needlework.ops.runtime.denylist import cache

    model, tokenizer = load_checkpoint(checkpoint)
    chosen: dict[str, Any] = {"lengths": tuple(sorted(set(length or ()))), "tasks": tuple(task or ())}
    evaluation = Evaluation(**{name: value for name, value in chosen.items() if value})
    own: dict[str, Any] = {"kind": "files", "paths": tuple(map(str, corpus)), "max_bytes": OWN_TEXT} if corpus else {}
    text = load_corpus(CorpusConfig(**own), tokenizer)
    if not as_json:
        console.print(text_read(text.manifest), soft_wrap=True)
    assert model.config.mixers is not None  # a dict once the config is made
    check_measurement(model.config.mixers, text, evaluation)
    folder = cache() / "measuring"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:  # a read-only home: measure all the same
        errors.print(f"{error}: nothing is kept if this is stopped", soft_wrap=True)
        entry = measure(model, text, evaluation)
    else:
        pieces = Pieces(folder, measurement(checkpoint, text, evaluation, model.device))
        try:
            entry = measure(model, text, evaluation, pieces.once)
        except KeyboardInterrupt:
            errors.print(f"stopped; {len(pieces.done)} numbers are kept, and the same command goes on from them")
            raise
        pieces.forget()
    entry |= {"title": checkpoint.name, "state_bytes": {str(T): state_bytes(model, T) for T in evaluation.lengths}}
    if as_json:
        print(json.dumps(entry, indent=2))
    else:
        console.print(scores({"lengths": evaluation.lengths, "mixers": [entry]}))


@app.command()
def generate(
    checkpoint: Annotated[Path, typer.Argument(help="A folder that `train` or `compare` wrote (…/checkpoint).")],
    prompt: Annotated[str, typer.Option(help="The text to go on from.")],
    tokens: Annotated[int, typer.Option(help="How many tokens to add.", min=1)] = 128,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token each time.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the sampling.", min=0, max=(1 << 64) - 1)] = 0,
) -> None:
    """Continue a text."""
    import torch

    if not (temperature == 0 or LEAST <= temperature < math.inf):
        raise ValueError(f"--temperature: got {temperature:g}, expected 0, or a finite number of at least {LEAST:g}")
    model, tokenizer = load_checkpoint(checkpoint)
    # with what the tokenizer itself puts before a text: ours puts nothing, Llama's its beginning of text
    ids = tokenizer.encode(prompt).ids if prompt else []
    if not ids:
        raise ValueError("--prompt is empty: expected at least one token to go on from")
    torch.manual_seed(seed)
    sampling: dict[str, Any] = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    ids = torch.tensor([ids], device=model.device)
    chosen = {"attention_mask": torch.ones_like(ids), "max_new_tokens": tokens, "streamer": Shown(tokenizer), **sampling}
    model.generate(ids, **chosen)  # pyrefly: ignore[bad-argument-type] (transformers asks of it what its encoder-decoders have)


class Shown:
    """What transformers' `generate` gives its tokens to: they are printed as they come, the prompt first."""

    def __init__(self, tokenizer: "Tokenizer"):
        from needlework.serve.text import Incremental

        self._text = Incremental(tokenizer.decode)

    def put(self, tokens: "Tensor") -> None:
        console.print(self._text.push(tokens.flatten().tolist()), end="", soft_wrap=True)

    def end(self) -> None:
        console.print(self._text.rest(), soft_wrap=True)


def load_checkpoint(path: Path, dtype: "torch.dtype | None" = None) -> "tuple[NeedleworkForCausalLM, Tokenizer]":
    """The model, in evaluation mode, on the GPU where there is one, in its own dtype or in this one, and its tokenizer."""
    import torch

    from needlework.data import load_tokenizer
    from needlework.experiment.pretrained import load_model

    model = load_model(path).eval()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # transformers wraps `to` as a function, and the checker takes its first argument for the model
    model = model.to(device, dtype or model.dtype)  # pyrefly: ignore[bad-argument-type]
    return model, load_tokenizer(path / "tokenizer.json")

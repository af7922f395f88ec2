"""One rule under one launch config on this machine: its outputs and gradients against the definition in float64, by the error budget."""

import math
import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from needlework.ops.api import OpSpec
from needlework.ops.qdelta.spec import growing
from needlework.ops.runtime import launch_configs
from needlework.testing.budget import ENOUGH
from needlework.testing.compare import differentiate, leaves, poisoned, whole
from needlework.testing.errors import in_budgets, mean_of_draws, norms, operand
from needlework.testing.steps import by_definition, by_steps
from needlework.testing.target_inputs import sample, spec_of, styles
from needlework.testing.targets import RULES

# Draws of the inputs that a failure takes. From draw to draw the logarithm of error / budget of a right form has a mean of at most
# -0.6 and a deviation of at most 0.43 (dg of identical keys, where all errors are one; elsewhere 0.05 to 0.2): a draw may be over
# by chance, the mean of 16 is 5 deviations below 0. What is wrong is wrong in every draw.
DRAWS = 16
# Over this, or not the same twice, or not run at all, a config goes on the denylist. A miscompiled product is off by its own size,
# thousands of times the budget; what is over by less than this is a limit of the form, the same on every machine, and is only reported.
WRONG = 2.0
DIFFERS = "differs between two runs"
# root mean square of a rounding error over x * eps, where leading digits are spread evenly over the scale: sqrt(3 / 8 / ln 2 / 12)
ROUNDING = 0.212


class Task(NamedTuple):
    """A rule under one config at one size and dtype: what one set of compiled kernels can be judged on."""

    rule: str
    engine: str
    config: str
    dtype: str
    K: int
    V: int
    forms: tuple[str, ...]


class Verdict(NamedTuple):
    """`ratio`: error ÷ budget of the worst tensor, at most 1 if right; `failing` says what is not; `wrong`: that it is the config's."""

    op: str
    engine: str
    config: str
    dtype: str
    K: int
    V: int
    form: str
    tensor: str
    ratio: float | None
    failing: tuple[str, ...]
    wrong: bool
    seconds: float  # what it took, the compilation of kernels that no form before it has launched included


# how a rule is run: tokens and sequences by which the kernels' paths differ
FORMS = {
    "short": "every style of input, 70 tokens",
    "long": "one sequence of `rule.long` tokens: enough that few heads are cut into segments",
    "wide": "48 sequences of `rule.wide` tokens: more tiles than programs",
    "packed": "cu_seqlens: four sequences, one empty",
    "grown": "160 tokens whose state passes what float16 holds, in bfloat16, of a rule whose step may make it longer",
    "grown-packed": "cu_seqlens: two such sequences, and an empty one between them",
    "step": "24 tokens one at a time, on a slot table with a padded row: more than the window of a rule that has one",
    "several": "the same, a few tokens at a time",
}
SHORT, STEP, SEVERAL = ("short",), ("step",), ("step", "several")
GROWN = ("grown", "grown-packed")
BRIEF = (*SHORT, *GROWN)  # so few tokens that the definition's own error is within reach
ROWS = tuple(form for form in FORMS if form not in (*SEVERAL, *GROWN))
ENDS = {"packed": (0, 100, 100, 217, 300), "grown-packed": (0, 160, 160, 320)}
FEW = 5  # tokens of a call of several


def judge(device: str, alone: bool, task: Task) -> list[Verdict] | None:
    """In a process of its own. None: this process has lost its GPU to an earlier failure, or its memory to its neighbours."""
    torch.set_num_threads(1)
    if device == "cuda" and not _alive():
        return [unjudged(task, "the GPU cannot be used")] if alone else None
    out = []
    for form in task.forms:
        began = time.monotonic()
        found: dict[str, float] = {}
        failing: tuple[str, ...] = ()
        wrong = False
        try:
            with launch_configs.forced(task.engine, task.config), _kernels(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found, failing = weigh(task, form, device)
            wrong = max(found.values()) > WRONG or any(reason.endswith(DIFFERS) for reason in failing)
        except (torch.OutOfMemoryError, MemoryError) as error:
            if not alone:
                return None
            failing = (_reason(error),)
        except Exception as error:  # a compiler and a launch raise what they like, and the other configs are still to be judged
            failing = (_reason(error),)
            # refused by the op: no kernel has run
            wrong = not (isinstance(error, ValueError) and "impl='triton'" in str(error))
        tensor = max(found, key=lambda name: found[name], default="")
        out.append(Verdict(*task[:-1], form, tensor, found.get(tensor), failing, wrong, round(time.monotonic() - began, 2)))
        if device == "cuda":
            if failing and not _alive():
                break
            torch.cuda.empty_cache()
    return out


def unjudged(task: Task, why: str, wrong: bool = False) -> Verdict:
    return Verdict(*task[:-1], task.forms[0], "", None, (why,), wrong, 0.0)


def _alive() -> bool:
    """Whether this process can use its GPU: after an illegal access it no longer can."""
    try:
        torch.ones(1, device="cuda").sum().item()
    except RuntimeError:
        return False
    return True


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def weigh(task: Task, form: str, device: str) -> tuple[dict[str, float], tuple[str, ...]]:
    """Error ÷ budget of every tensor, and what is wrong: over the budget in the mean of DRAWS, or not the same twice.

    The inputs are drawn again only while a tensor is over its budget in the geometric mean of the draws so far.
    """
    differing: list[str] = []
    last: dict[str, float] = {}

    def draws() -> Iterator[dict[str, float]]:
        nonlocal differing, last
        for seed in range(DRAWS):
            last, differing = draw(task, form, device, seed)
            if differing:
                return
            yield last

    mean = mean_of_draws(draws())
    if differing:
        return last, tuple(f"{name} {DIFFERS}" for name in differing)
    return mean, tuple(f"{name} {ratio:.2f}" for name, ratio in mean.items() if ratio > 1)


def draw(task: Task, form: str, device: str, seed: int) -> tuple[dict[str, float], list[str]]:
    """error ÷ budget by tensor, and the tensors that a second run, in poisoned memory, does not repeat to the bit."""
    spec, dtype = spec_of(task.rule), getattr(torch, task.dtype)
    inputs, groups = _inputs(task, spec, form, seed)
    stored = {n: x.to(device, dtype if n in spec.half else torch.float32) for n, x in inputs.items()}
    wide = {n: x.double() for n, x in stored.items()}
    single = {n: x.float() for n, x in stored.items()}
    settings = {"cu_seqlens": torch.tensor(ENDS[form], device=device)} if form in ENDS else {}
    values = lambda call, x: _joined(differentiate(call, x))
    if form in SEVERAL or "gradients" in spec.skip:
        values = lambda call, x: dict(leaves(call(x)))
    if form in SEVERAL:
        R = FEW if form == "several" else 1
        run = lambda: by_steps(spec, stored, R)
        in_double = printed = partial(by_definition, spec, dtype, R)  # no operand of a step is rounded
        in_single = lambda half: in_double
    else:
        run = lambda: values(whole(spec.chunk, impl="triton", **settings), stored)
        # torch's chunk form, which the battery shows to be the definition at 1e-12: a token loop is tens of thousands of launches
        in_double = whole(spec.chunk, impl="torch", **settings)
        in_print = lambda half: whole(spec.literal, operand=half, chunk_size=_chunk(task), **settings)
        printed = in_print(operand(dtype))
        # and for thousands of tokens it keeps a state a token: the printed form replaces it there
        in_single = (lambda half: whole(spec.recurrent, operand=half, **settings)) if form in BRIEF else in_print
    exact, literal = values(in_double, wide), values(printed, single)
    fast = run()
    with poisoned():
        again = run()
    differing = [name for name, x in fast.items() if not torch.equal(x, again[name]) and torch.isfinite(x).all()]
    floors = {}
    if dtype.itemsize == 2 and "dg" in fast and not task.rule.startswith("path"):  # whose dg sums pairs
        # the row identity, which the cards speak of: what it subtracts from one another is rounded (the budget's floor for it, e ⊙ de left
        # out)
        products = [(wide[x] * exact[f"d{x}"]).flatten(1) for x in ("q", "k")]
        floors["dg"] = torch.finfo(dtype).eps / 2 * torch.cat(products, 1)

    def ratios(definition: dict[str, Tensor], lucky: dict[str, tuple[Tensor, Tensor]]) -> dict[str, float]:
        found = {}
        for name, x in fast.items():
            ways = x, exact[name], definition[name], literal[name]
            # the first axis of all but parameters' gradients is the batch
            apart = name not in {f"d{n}" for n in inputs if n not in spec.tokens} and x.numel() >= ENOUGH * len(groups)
            for i, ratio in enumerate(ratios_by_group(*ways, len(groups) if apart else 1, lucky.get(name), floors.get(name))):
                found[f"{name}, {groups[i]}" if apart and groups[i] else name] = ratio
        return found

    # what is within twice the printed form's own error is within the budget, whatever the definition's own is
    definition, found = literal, ratios(literal, {})
    if form in BRIEF and max(found.values()) > 1:
        definition = values(in_single(operand(dtype)), single)
        found = ratios(definition, {})
    if dtype.itemsize == 2 and max(found.values()) > 1:
        # sums of numbers that half precision holds may come out exact in float32: the definition on the numbers before
        given = {n: x.to(device, torch.float32) for n, x in inputs.items()}
        own = values(in_single(operand(torch.float32)), given)
        true = values(in_double, {n: x.double() for n, x in given.items()})
        found = ratios(definition, {name: (own[name], true[name]) for name in fast})
    return found, differing


def ratios_by_group(
    fast: Tensor, exact: Tensor, definition: Tensor, literal: Tensor, groups: int, lucky: tuple[Tensor, Tensor] | None = None,
    floor: Tensor | None = None,
) -> list[float]:  # fmt: skip
    """error ÷ budget of each group of batch rows, as `errors.py` has it, with one more floor: what rounding to the result's dtype
    costs numbers of this size; and with `lucky` another, the definition's own error in float32 on numbers that need rounding. It
    can be exact by luck on others. The norm of `floor` comes on top."""
    if not fast.is_floating_point():
        return [0.0 if torch.equal(fast, exact) else math.inf]
    fast, exact, definition, literal = (x.reshape(groups, -1) for x in (fast, exact, definition, literal))
    error, *own = (norms(x.double() - exact, 0) for x in (fast, definition, literal, exact.to(fast.dtype)))
    if lucky is not None:
        own.append(norms((lucky[0].double() - lucky[1]).reshape(groups, -1), 0))
    own.append(ROUNDING * torch.finfo(fast.dtype).eps * norms(exact, 0))
    budget = 2 * torch.stack(own).amax(0)
    if floor is not None:
        budget += norms(floor.reshape(groups, -1), 0)
    return in_budgets(error, budget).tolist()


def _inputs(task: Task, spec: OpSpec, form: str, seed: int) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """The inputs, and what the groups of their batch rows are."""
    make = lambda B, T, style: sample(task.rule, generator, B, T, style, task.K, task.V)
    generator = torch.Generator().manual_seed(seed)
    if form == "packed":
        return make(1, ENDS[form][-1], "random"), ("",)
    if form in GROWN:
        sequences = [growing(generator, 1, 160, K=task.K, V=task.V) for _ in range(2 if form in ENDS else 1)]
        return {name: torch.cat([x[name] for x in sequences], 1) for name in sequences[0]}, ("",)
    if form in ("long", "wide"):
        rule = next(rule for rule in RULES if rule.spec == task.rule)
        return make(*{"long": (1, rule.long), "wide": (48, rule.wide)}[form], "random"), ("",)
    groups = styles(spec)
    T = 5 if launch_configs.interpreted() else 24 if form in SEVERAL else 70
    parts = [make(2 if form in SEVERAL else 1, T, style) for style in groups]
    # a parameter of the layer is one for all
    joined = {n: torch.cat([part[n] for part in parts]) if n in spec.tokens else x for n, x in parts[0].items()}
    return joined, groups


def _joined(parts: tuple[dict[str, Tensor], dict[str, Tensor]]) -> dict[str, Tensor]:
    return {**parts[0], **parts[1]}


def _chunk(task: Task) -> int:
    row = next(row for row in launch_configs.rows(task.engine) if row.name == task.config)
    return row.launch.get("shared", {}).get("C", 64)


@contextmanager
def _kernels() -> Iterator[None]:
    """Steps take no `impl`: the environment asks for the kernels."""
    before = os.environ.get("NEEDLEWORK_IMPL")
    os.environ["NEEDLEWORK_IMPL"] = "triton"
    try:
        yield
    finally:
        del os.environ["NEEDLEWORK_IMPL"]
        os.environ |= {} if before is None else {"NEEDLEWORK_IMPL": before}

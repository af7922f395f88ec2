"""`needlework doctor`: whether the kernels are right on this machine, under every launch plan that may be picked here.

A compiler can get a kernel wrong without a word, and differently from one release to the next. Every rule runs under each plan,
forward and backward, twice, against the definition in float64 by the error budget; what is wrong is struck off
(`ops/common/struck.py`) and never taken here again. Which rules and plans: `targets.py`.
"""

import math
import os
import platform
import signal
import time
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch
from torch import Tensor

from needlework.ops.api import OpSpec
from needlework.ops.common import launch, struck
from needlework.testing.checks import ENOUGH
from needlework.testing.compare import differentiate, leaves, whole
from needlework.testing.errors import norms, operand
from needlework.testing.processes import context, cores
from needlework.testing.steps import by_definition, by_steps
from needlework.testing.targets import RULES, Rule, sample, sizes, spec_of, styles, taken

# Draws of the inputs that a failure takes. From draw to draw the logarithm of error / budget of a right form has a mean of at most
# -0.6 and a deviation of at most 0.43 (dg of identical keys, where all errors are one; elsewhere 0.05 to 0.2): a draw may be over
# by chance, the mean of 16 is 5 deviations below 0. What is wrong is wrong in every draw.
DRAWS = 16
# Over this, or not the same twice, or not run at all, a plan is struck off. A miscompiled product is off by its own size, thousands
# of times the budget; what is over by less than this is a limit of the form, the same on every machine, and is only reported.
WRONG = 2.0
DIFFERS = "differs between two runs"
# root mean square of a rounding error over x * eps, where leading digits are spread evenly over the scale: sqrt(3 / 8 / ln 2 / 12)
ROUNDING = 0.212
# bytes of the GPU that a process may want: the context, the kernels' code, a token loop's saved states
A_PROCESS = 5 * 2**30
# seconds that a task may take, many times what the slowest needs: a kernel that waits for what never comes does not end
LIMIT = 300


class Task(NamedTuple):
    """A rule under one plan at one size and dtype: what one set of compiled kernels can be judged on."""

    rule: str
    engine: str
    plan: str
    dtype: str
    K: int
    V: int
    forms: tuple[str, ...]


class Verdict(NamedTuple):
    """`ratio`: error ÷ budget of the worst tensor, at most 1 if right; `failing` says what is not; `wrong`: that it is the plan's."""

    op: str
    engine: str
    plan: str
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
    "step": "24 tokens one at a time, on a slot table with a padded row: more than the window of a rule that has one",
    "several": "the same, a few tokens at a time",
}
SHORT, STEP, SEVERAL = ("short",), ("step",), ("step", "several")
ROWS = tuple(form for form in FORMS if form not in SEVERAL)
ENDS = (0, 100, 100, 217, 300)
FEW = 5  # tokens of a call of several


def tasks(device: torch.device, full: bool) -> list[Task]:
    """What may be picked here, longest first."""
    interpreted = launch.interpreted()
    arch = launch.capability(device)
    found: list[Task] = []
    for rule in RULES:
        for engine, step in ((rule.chunk, False), (rule.step, True)):
            for row in launch.rows(engine) if engine else ():
                for dtype in ("float32",) if interpreted else ("bfloat16", "float16", "float32"):
                    steps = SEVERAL if rule.several else STEP
                    if interpreted:
                        chosen = [(size, SHORT) for size in sizes(row, arch, dtype, rule.keys_alone)[:1]]
                    else:
                        chosen = _chosen(rule, row, arch, dtype, full)
                    found += [
                        Task(rule.spec, engine, row.name, dtype, *size, steps if step else forms) for size, forms in chosen
                    ]
    if interpreted:  # that the doctor works; the kernels have the battery there
        found = list({task.engine: task for task in reversed(found)}.values())
    # what is near its budget, most often float16, is drawn again and again
    return sorted(found, key=lambda task: (-len(task.forms), task.dtype != "float16", -task.K * task.V))


def _chosen(rule: Rule, row: launch.Plan, arch: tuple[int, int], dtype: str, full: bool) -> list[tuple[tuple, tuple]]:
    """Sizes and forms: with `full` all. Without, at the largest size that takes the row now: the rules that cover the kernels in every
    dtype, in the first one by every form; the others in bfloat16 at the first row alone. Each size is another compilation of every
    kernel."""
    if full:
        return [(size, ROWS) for size in sizes(row, arch, dtype, rule.keys_alone)]
    here = lambda row, dtype: taken(row, arch, dtype, rule.keys_alone)
    found = here(row, dtype)
    if found and rule.covers:
        return [(found[-1], ROWS if dtype == next(name for name in row.dtypes if here(row, name)) else SHORT)]
    first = next((other for other in launch.rows(row.engine) if here(other, "bfloat16")), None)
    return [(found[-1], SHORT)] if found and dtype == "bfloat16" and row == first else []


def judge(device: str, alone: bool, task: Task) -> list[Verdict] | None:
    """In a process of its own. None: this process has lost its GPU to an earlier failure, or its memory to its neighbours."""
    torch.set_num_threads(1)
    if device == "cuda" and not _alive():
        return [_unjudged(task, "the GPU cannot be used")] if alone else None
    out = []
    for form in task.forms:
        began = time.monotonic()
        found: dict[str, float] = {}
        failing: tuple[str, ...] = ()
        wrong = False
        try:
            with launch.forced(task.engine, task.plan), _kernels(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found, failing = weigh(task, form, device)
            wrong = max(found.values()) > WRONG or any(told.endswith(DIFFERS) for told in failing)
        except (torch.OutOfMemoryError, MemoryError) as error:
            if not alone:
                return None
            failing = (_told(error),)
        except Exception as error:  # a compiler and a launch raise what they like, and the other plans are still to be judged
            failing = (_told(error),)
            # refused by the op: no kernel has run
            wrong = not (isinstance(error, ValueError) and "impl='triton'" in str(error))
        tensor = max(found, key=found.get, default="")
        out.append(Verdict(*task[:-1], form, tensor, found.get(tensor), failing, wrong, round(time.monotonic() - began, 2)))
        if device == "cuda":
            if failing and not _alive():
                break
            torch.cuda.empty_cache()
    return out


def _unjudged(task: Task, why: str, wrong: bool = False) -> Verdict:
    return Verdict(*task[:-1], task.forms[0], "", None, (why,), wrong, 0.0)


def _alive() -> bool:
    """Whether this process can use its GPU: after an illegal access it no longer can."""
    try:
        torch.ones(1, device="cuda").sum().item()
    except RuntimeError:
        return False
    return True


def _told(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def weigh(task: Task, form: str, device: str) -> tuple[dict[str, float], tuple[str, ...]]:
    """Error ÷ budget of every tensor, and what is wrong: over the budget in the mean of DRAWS, or not the same twice.

    The inputs are drawn again only while a tensor is over its budget in the geometric mean of the draws so far.
    """
    logs: dict[str, float] = defaultdict(float)
    for seed in range(DRAWS):
        found, differing = draw(task, form, device, seed)
        if differing:
            return found, tuple(f"{name} {DIFFERS}" for name in differing)
        for name, ratio in found.items():
            logs[name] += math.log(max(ratio, 1e-6)) if math.isfinite(ratio) else math.inf
        mean = {name: math.exp(total / (seed + 1)) for name, total in logs.items()}
        if all(ratio <= 1 for ratio in mean.values()):
            return mean, ()
    return mean, tuple(f"{name} {ratio:.2f}" for name, ratio in mean.items() if ratio > 1)


def draw(task: Task, form: str, device: str, seed: int) -> tuple[dict[str, float], list[str]]:
    """error ÷ budget by tensor, and the tensors that a second run, in poisoned memory, does not repeat to the bit."""
    spec, dtype = spec_of(task.rule), getattr(torch, task.dtype)
    inputs, groups = _inputs(task, spec, form, seed)
    stored = {n: x.to(device, dtype if n in spec.half else torch.float32) for n, x in inputs.items()}
    wide = {n: x.double() for n, x in stored.items()}
    single = {n: x.float() for n, x in stored.items()}
    settings = {"cu_seqlens": torch.tensor(ENDS, device=device)} if form == "packed" else {}
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
        # and for thousands of tokens it keeps a state a token: the printed form stands for it there
        in_single = (lambda half: whole(spec.recurrent, operand=half)) if form == "short" else in_print
    exact, literal = values(in_double, wide), values(printed, single)
    fast = run()
    with _poisoned():
        again = run()
    differing = [name for name, x in fast.items() if not torch.equal(x, again[name]) and torch.isfinite(x).all()]
    floors = {}
    if dtype.itemsize == 2 and "dg" in fast:
        # the row identity, which the cards speak of: what it subtracts from one another is rounded (DESIGN's floor, e ⊙ de left out)
        products = [(wide[x] * exact[f"d{x}"]).flatten(1) for x in ("q", "k")]
        floors["dg"] = torch.finfo(dtype).eps / 2 * torch.cat(products, 1)

    def ratios(definition: dict[str, Tensor], lucky: dict[str, tuple[Tensor, Tensor]]) -> dict[str, float]:
        found = {}
        for name, x in fast.items():
            ways = x, exact[name], definition[name], literal[name]
            # the first axis of all but parameters' gradients is the batch
            apart = name not in {f"d{n}" for n in inputs if n not in spec.tokens} and x.numel() >= ENOUGH * len(groups)
            for i, ratio in enumerate(over_budget(*ways, len(groups) if apart else 1, lucky.get(name), floors.get(name))):
                found[f"{name}, {groups[i]}" if apart and groups[i] else name] = ratio
        return found

    # what is within twice the printed form's own error is within the budget, whatever the definition's own is
    definition, found = literal, ratios(literal, {})
    if form == "short" and max(found.values()) > 1:
        definition = values(in_single(operand(dtype)), single)
        found = ratios(definition, {})
    if dtype.itemsize == 2 and max(found.values()) > 1:
        # sums of numbers that half precision holds may come out exact in float32: the definition on the numbers before
        given = {n: x.to(device, torch.float32) for n, x in inputs.items()}
        own = values(in_single(operand(torch.float32)), given)
        true = values(in_double, {n: x.double() for n, x in given.items()})
        found = ratios(definition, {name: (own[name], true[name]) for name in fast})
    return found, differing


def over_budget(
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
    ratio = torch.where(error == 0, torch.zeros_like(error), error / budget)
    return ratio.tolist()


def _inputs(task: Task, spec: OpSpec, form: str, seed: int) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """The inputs, and what the groups of their batch rows are."""
    make = lambda B, T, style: sample(task.rule, generator, B, T, style, task.K, task.V)
    generator = torch.Generator().manual_seed(seed)
    if form == "packed":
        return make(1, ENDS[-1], "random"), ("",)
    if form in ("long", "wide"):
        rule = next(rule for rule in RULES if rule.spec == task.rule)
        return make(*{"long": (1, rule.long), "wide": (48, rule.wide)}[form], "random"), ("",)
    groups = styles(spec)
    T = 5 if launch.interpreted() else 24 if form in SEVERAL else 70
    parts = [make(2 if form in SEVERAL else 1, T, style) for style in groups]
    # a parameter of the layer is one for all
    joined = {n: torch.cat([part[n] for part in parts]) if n in spec.tokens else x for n, x in parts[0].items()}
    return joined, groups


def _joined(parts: tuple[dict[str, Tensor], dict[str, Tensor]]) -> dict[str, Tensor]:
    return {**parts[0], **parts[1]}


def _chunk(task: Task) -> int:
    row = next(row for row in launch.rows(task.engine) if row.name == task.plan)
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


@contextmanager
def _poisoned() -> Iterator[None]:
    """torch.empty gives NaN: what a kernel does not write shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    fill, torch.utils.deterministic.fill_uninitialized_memory = torch.utils.deterministic.fill_uninitialized_memory, True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = fill


def run(device: torch.device, full: bool, done: Callable[[Verdict, int, int], None]) -> list[Verdict]:
    """Every verdict, told as it comes with its number and how many there will be, and the failures recorded. What is taken in the place
    of a plan that is struck off now is judged then."""
    verdicts: list[Verdict] = []
    seen: set[Task] = set()
    while todo := [task for task in tasks(device, full) if task not in seen]:
        total = len(verdicts) + sum(len(task.forms) for task in todo)
        for verdict in judged(device, todo, _processes(device)):
            verdicts.append(verdict)
            done(verdict, len(verdicts), total)
        if not launch.interpreted():
            struck.record(outcome(verdicts, full))
        seen |= set(todo)
    order = {rule.spec: i for i, rule in enumerate(RULES)}
    return sorted(verdicts, key=lambda v: (v.form in SEVERAL, order[v.op], v.plan, v.dtype, v.K, tuple(FORMS).index(v.form)))


def outcome(verdicts: list[Verdict], full: bool) -> dict[str, str | None]:
    """ "engine/plan/dtype" -> why it is struck off. Only a full run takes a strike back: a short one has not seen what failed."""
    found: dict[str, str | None] = {}
    for v in verdicts:
        key = f"{v.engine}/{v.plan}/{v.dtype}"
        if v.wrong:
            found.setdefault(key, f"{v.op}, {v.form}, K {v.K}, V {v.V}: {'; '.join(v.failing)}")
    passed = {f"{v.engine}/{v.plan}/{v.dtype}": None for v in verdicts} if full else {}
    return passed | found


class Helper:
    """A process that judges one task after another. It can be ended, which a thread or a pool's worker cannot."""

    def __init__(self, device: str, alone: bool) -> None:
        made = context()
        self.pipe, theirs = made.Pipe()
        self.process = made.Process(target=_serve, args=(theirs, device, alone), daemon=True)
        self.process.start()
        theirs.close()

    def give(self, task: Task) -> None:
        self.task, self.until = task, time.monotonic() + LIMIT
        self.pipe.send(task)

    def answer(self) -> list[Verdict] | str | None:
        """Its verdicts, None for none, or what became of it; to be asked when there is one or the time is over."""
        if not self.pipe.poll():
            return f"did not end in {LIMIT} s"
        try:
            return self.pipe.recv()
        except EOFError:
            return "its process died"

    def end(self) -> None:
        self.process.kill()
        self.process.join(10)
        self.pipe.close()


def _serve(pipe: Connection, device: str, alone: bool) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which ends its helpers
    while True:
        pipe.send(judge(device, alone, pipe.recv()))


def judged(device: torch.device, todo: list[Task], processes: int) -> Iterator[Verdict]:
    """Verdicts as they come, judged side by side: most of the time is compilation. A kernel that dies or hangs takes only its own
    process along; what came to no verdict beside others is judged again alone, in a process of its own."""
    again = []
    for task, outcome in _outcomes(device.type, todo, processes):
        if isinstance(outcome, list):
            yield from outcome
        elif processes > 1:
            again.append(task)
        else:
            yield _unjudged(task, outcome, wrong=True)
    if again:
        yield from judged(device, again, 1)


def _outcomes(device: str, todo: list[Task], processes: int) -> Iterator[tuple[Task, list[Verdict] | str | None]]:
    left, busy = deque(todo), []
    try:
        while left or busy:
            while left and len(busy) < processes:
                busy.append(Helper(device, processes == 1))
                busy[-1].give(left.popleft())
            soonest = min(helper.until for helper in busy)
            ready = wait([helper.pipe for helper in busy], max(soonest - time.monotonic(), 0))
            for helper in [h for h in busy if h.pipe in ready or h.until <= time.monotonic()]:
                task, outcome = helper.task, helper.answer()
                # a process that has lost its GPU is of no more use
                if left and isinstance(outcome, list) and processes > 1:
                    helper.give(left.popleft())
                else:
                    busy.remove(helper)
                    helper.end()
                yield task, outcome
    finally:
        for helper in busy:
            helper.end()


def _processes(device: torch.device) -> int:
    if device.type != "cuda":
        return cores()
    return max(1, min(cores(), torch.cuda.mem_get_info()[0] // A_PROCESS))


def facts() -> dict[str, Any]:
    """What a verdict depends on."""
    from needlework.ops.common.triton_compile import versions

    arch = torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)
    known = {"machine": struck.machine(), "python": platform.python_version(), "torch": torch.__version__}
    return known | {"cuda": torch.version.cuda, "capability": f"{arch[0]}.{arch[1]}", **versions(10 * arch[0] + arch[1])}


def warning(facts: dict[str, Any], arch: tuple[int, int]) -> str | None:
    """What is known of this combination of tools."""
    number = lambda text: tuple(int(part) for part in text.split("+")[0].split(".")[:3] if part.isdigit())
    if arch == (9, 0) and (3, 4) <= number(facts["triton"]) < (3, 7, 1) and number(facts["ptxas"]) < (13, 3):
        return (
            f"Triton {facts['triton']} with ptxas {facts['ptxas']}: Triton 3.4 to 3.7.0 silently miscompiles on Hopper a product whose "
            "first operand is the result of another, transposed in registers, and some 64-wide kernels of four warps "
            "(flash-linear-attention issues 640 and 984). The kernels here form no such product; whether each is right under this "
            "compiler is what doctor measures on the GPU."
        )


def report(rows: list[NamedTuple], known: dict[str, Any], seconds: float) -> dict[str, Any]:
    made = {"made": time.strftime("%Y-%m-%d %H:%M:%S"), "seconds": round(seconds, 1)}
    return {**made, **known, "struck": str(struck.path()), "rows": [row._asdict() for row in rows]}

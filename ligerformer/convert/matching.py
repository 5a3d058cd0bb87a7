"""Rules against a checkpoint: what goes where, decided in full before a byte of weights is read."""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import os
import re
import threading
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from torch import Tensor, nn

from ..progress import Progress
from .errors import fail
from .report import LoadReport
from .rules import Rule, check_table
from .safetensors_file import Entry, Reader, same_values

THREADS = min(4, os.cpu_count() or 1)  # readers: what takes the time is the kernel giving out fresh pages, and that runs in parallel


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Everything that a checkpoint of ``model`` holds: parameters and persistent buffers, one that stands under two names once."""
    seen: dict[int, str] = {}
    return {name: x for name, x in model.state_dict(keep_vars=True).items() if seen.setdefault(id(x), name) == name}


def canonical_names(model: nn.Module, natives: Collection[str]) -> dict[str, str]:
    """For each name, the one under which ``named_tensors`` has that tensor (a tied head's weight is the embedding's).

    A name that leads to no tensor of the model is left out.
    """
    by_identity = {id(x): name for name, x in named_tensors(model).items()}
    found = {}
    for native in natives:
        try:
            tensor = operator.attrgetter(native)(model)
        except AttributeError:
            continue
        if id(tensor) in by_identity:
            found[native] = by_identity[id(tensor)]
    return found


@dataclasses.dataclass
class Match:
    """What loading will do. ``problems`` is empty where it can."""

    copies: list[tuple[Rule, int, Entry]] = dataclasses.field(default_factory=list)  # a rule, which of its sources, the tensor
    twins: list[tuple[Entry, Entry]] = dataclasses.field(default_factory=list)  # two tensors that must be equal: their parameter is tied
    initialize: list[str] = dataclasses.field(default_factory=list)
    ignored: dict[str, str] = dataclasses.field(default_factory=dict)
    canonical: dict[str, str] = dataclasses.field(default_factory=dict)
    problems: list[str] = dataclasses.field(default_factory=list)


def match(
    model: nn.Module,
    rules: Sequence[Rule],
    entries: Mapping[str, Entry],
    *,
    published: Sequence[Rule] | None = None,
    ignored: Sequence[str] = (),
) -> Match:
    """Decide for every parameter and every tensor of the checkpoint.

    ``rules`` are those of the model as it is built, ``published`` those of the model as the checkpoint's config describes it, where an
    override made a difference: what an override added is initialised, what it took away is ignored. ``entries`` stand under the names that
    the rules use. ``ignored`` are patterns of whole tensor names (as in the files) that are no part of the model, a named group saying why.
    """
    check_table(rules)
    tensors, result = named_tensors(model), Match()
    result.canonical = canonical_names(model, [r.native for r in rules])
    sources = {s for r in rules for s in r.sources}
    known = sources if published is None else {s for r in published for s in r.sources}
    groups: dict[str, list[Rule]] = {}
    for rule in rules:
        if rule.native in result.canonical:
            groups.setdefault(result.canonical[rule.native], []).append(rule)
        else:
            result.problems.append(f"the model has no parameter {rule.native}, which a rule fills from {', '.join(rule.sources)}")
    for name, tensor in tensors.items():
        if name in groups:
            _match_parameter(name, tensor, groups[name], entries, known, result)
        elif published is None:
            result.problems.append(f"no rule fills parameter {name} {list(tensor.shape)}")
        else:
            result.initialize.append(name)
    _match_leftovers({n: e for n, e in entries.items() if n not in sources}, known, ignored, result)
    return result


def _match_parameter(
    name: str, tensor: Tensor, rules: Sequence[Rule], entries: Mapping[str, Entry], known: Collection[str], result: Match
) -> None:
    """One parameter, and its rules: more than one where it is tied and the checkpoint may hold it under several names."""
    given = [rule for rule in rules if any(s in entries for s in rule.sources)]
    if not given and not any(s in known for rule in rules for s in rule.sources):
        result.initialize.append(name)
        return
    for rule in given or rules[:1]:
        try:
            views = rule.views(tensor)
        except ValueError as error:
            result.problems.append(str(error))
            continue
        for index, (source, view) in enumerate(zip(rule.sources, views, strict=True)):
            if source not in entries:
                result.problems.append(f"missing: {source} {list(view.shape)}, for {rule.native}{_about_ties(rule)}")
                continue
            entry = entries[source]
            if problem := _misfit(entry, view, rule.native):
                result.problems.append(problem)
            elif rule is given[0]:
                result.copies.append((rule, index, entry))
            elif index < len(given[0].sources) and given[0].sources[index] in entries:
                result.twins.append((entries[given[0].sources[index]], entry))


def renamed(entries: Mapping[str, Entry], pairs: Sequence[tuple[str, str]]) -> dict[str, Entry]:
    """The entries under the names that rules use: of the (pattern, replacement) pairs, the first that matches a name is applied."""
    result: dict[str, Entry] = {}
    problems = []
    for name, entry in entries.items():
        matching = ((pattern, replacement) for pattern, replacement in pairs if re.match(pattern, name))
        new = next((re.sub(pattern, replacement, name, count=1) for pattern, replacement in matching), name)
        if new in result:
            problems.append(f"tensors {result[new].name} and {name} both stand for {new}")
        result[new] = entry
    fail(problems, "the checkpoint gives a tensor under two names")
    return result


def _about_ties(rule: Rule) -> str:
    if rule.native != "head.weight":
        return ""
    return "; the config says that the head has a weight of its own (if it is the embedding's, overrides={'tie_embeddings': True})"


def _misfit(entry: Entry, view: Tensor, native: str) -> str | None:
    if entry.shape != tuple(view.shape):
        return f"mis-shaped: {entry.name} is {list(entry.shape)} in the file; {native} takes {list(view.shape)}"
    if entry.dtype is None:
        return (
            f"quantised: {entry.name} is {entry.dtype_name}, for {native}; quantised weights are not read: "
            "take the checkpoint's bf16 form, or dequantise it first"
        )
    if entry.dtype.is_floating_point != view.is_floating_point() or entry.dtype.is_complex != view.is_complex():
        return f"mistyped: {entry.name} is {entry.dtype_name} in the file; {native} takes {str(view.dtype).removeprefix('torch.')}"
    return None


def _match_leftovers(leftovers: Mapping[str, Entry], known: Collection[str], ignored: Sequence[str], result: Match) -> None:
    patterns = [re.compile(pattern) for pattern in ignored]
    for name, entry in leftovers.items():
        useless = next((found for p in patterns if (found := p.fullmatch(entry.name))), None)
        if useless:
            result.ignored[entry.name] = (useless.lastgroup or "no part of this model").replace("_", " ")
        elif name in known:
            result.ignored[entry.name] = "an override put something else in its place"
        else:
            result.problems.append(f"unexpected: {entry.name} {entry.dtype_name} {list(entry.shape)} in {entry.file.name}")


def check(result: Match, headline: str) -> None:
    """Raise one CheckpointError with everything that is wrong, or with the tied parameters whose two tensors differ."""
    fail(result.problems, headline)
    differing = [
        f"{second.name} differs from {first.name}, while the config ties the two"
        " (if they are two weights, overrides={'tie_embeddings': False})"
        for first, second in result.twins
        if not same_values(first, second)
    ]
    fail(differing, headline)


def copy(model: nn.Module, result: Match, report: LoadReport) -> None:
    """Read every matched tensor straight into its place, several at a time, and note it in ``report``."""
    tensors = {name: x.detach() for name, x in named_tensors(model).items()}
    jobs = [(rule, entry, rule.views(tensors[result.canonical[rule.native]])[index]) for rule, index, entry in result.copies]
    jobs.sort(key=lambda job: (str(job[1].file), job[1].start))
    own = threading.local()
    with contextlib.ExitStack() as readers, Progress(sum(e.num_bytes for _, e, _ in jobs), f"loading {report.folder.name}") as progress:

        def start() -> None:
            own.reader = readers.enter_context(Reader())

        with ThreadPoolExecutor(THREADS, initializer=start) as pool:
            reads = [pool.submit(lambda entry, view: own.reader.copy(entry, view), entry, view) for _, entry, view in jobs]
            try:
                for read, (rule, entry, view) in zip(reads, jobs, strict=True):
                    read.result()
                    report.add(rule.native, rule.sources, entry, view.dtype)
                    progress.update(entry.num_bytes)
            finally:
                pool.shutdown(cancel_futures=True)
    for first, second in result.twins:
        report.ties[second.name] = f"equal to {first.name}, with which it is tied"
    for native, name in result.canonical.items():
        if native != name:
            report.ties[native] = f"is {name}"
    report.ignored |= result.ignored
    report.initialized = tuple(result.initialize)

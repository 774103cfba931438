"""The outer search: all that the pins leave, searched, evaluated by another route, and explained.

`space` lists what is legal, `best_first` finds the fastest that fits and proves it, the independent
evaluator must agree with the objective, the plain recipes must not be faster, and when nothing fits
`infeasible` says what would.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from autopar.block_cost import CostProvider, ExpertProvider, SequenceProvider
from autopar.cluster import Cluster
from autopar.cost.evaluate import Evaluation, assert_agrees, evaluate
from autopar.cost.optimizer import check_host
from autopar.cost.setting import Setting
from autopar.errors import PassError, UsageError
from autopar.search import interleaved
from autopar.search.best_first import TIE, BestFirst, fastest_others, keep_fastest
from autopar.search.neighbours import neighbours
from autopar.search.options import SearchOptions, check_pins
from autopar.search.prices import Prices
from autopar.search.progress import Progress
from autopar.search.recipes import recipes
from autopar.search.recompute_pin import named_blocks
from autopar.search.result import Choice, Neighbour, RecipeScore, SearchResult
from autopar.search.space import cp_degrees, legal_degrees, settings, uneven_chunks
from autopar.units import format_seconds

NO_SEQUENCE = "there are no prices of parts of a sequence"
NO_EXPERTS = "there are no prices of parts of a layer's experts"

# What a plan says where a family of decisions is searched, and not all: of cuts where parts of the
# chain take turns (`interleaved.candidates`), and of blocks that are kept gathered (`gathered`).
SOME_CUTS = (
    "of the cuts of this schedule those are searched that divide the blocks, their work or their"
    " bytes nearly evenly, with any lighter first and last part"
)
KEPT_LAST = "of alike blocks of a stage the last ones are kept gathered, and the first of all"


def _families(state: BestFirst) -> list[str]:
    """What is to be said of the plan's decisions that were searched in a family."""
    if state.best is None:
        return []
    setting, blocks = state.best.setting, len(state.prices.provider.block_names)
    cut = setting.in_turns and state.starts is None
    some = cut and not interleaved.all_are_searched(blocks, setting.mesh.pp * setting.chunks)
    kept = bool(state.best.keep_label) and state.kept is None
    return [*([SOME_CUTS] if some else []), *([KEPT_LAST] if kept else [])]


def _not_worse(best: Choice, scores: Sequence[RecipeScore], *, proven: bool) -> Choice:
    """The better of the plan and the plain recipes; only an unfinished search can be beaten."""
    for score in scores:
        if (
            score.fits
            and score.choice
            and score.choice.step_seconds < best.step_seconds * (1 - TIE)
        ):
            if proven:
                raise PassError(
                    f"{score.name} takes {score.choice.step_seconds} s, the plan that is called"
                    f" optimal {best.step_seconds} s",
                    next_step="this is a fault of autopar: report the model, cluster and options",
                )
            best = score.choice
    return best


def legal_settings(
    provider: CostProvider, cluster: Cluster, options: SearchOptions
) -> tuple[list[Setting], list[str]]:
    """All configurations that the pins, the model and the batch leave, and what was left out."""
    names = provider.block_names
    degrees = legal_degrees(provider, cluster)
    on_cp = cp_degrees(provider, cluster)
    reason = provider.no_sequence if isinstance(provider, SequenceProvider) else NO_SEQUENCE
    experts = (1, NO_EXPERTS)
    if isinstance(provider, ExpertProvider):
        experts = (provider.experts, provider.no_experts)
    check_host(options.optimizer, cluster.device)
    check_pins(options.pins, cluster, options.global_batch, names, degrees, on_cp, reason, experts)
    found, notes = settings(provider, cluster, options, degrees)
    if not found:
        raise UsageError(
            f"no configuration of {cluster.size} ranks is legal: {'; '.join(notes) or 'pins'}",
            next_step="change the global batch, the number of ranks or the pins",
        )
    return found, notes


def search(
    provider: CostProvider,
    cluster: Cluster,
    options: SearchOptions,
    progress: Callable[[Progress], None] | None = None,
    *,
    explain: bool = True,
) -> SearchResult:
    """The fastest plan that fits, with its proof; `status` is `infeasible` when none does.

    `explain=False` skips recipes, alternatives and neighbours. `infeasible.explain_infeasible` says
    what would make an impossible request possible. Raises `UsageError` for pins that contradict
    each other, the model, the cluster or the batch, and `PassError` when the independent evaluation
    of the plan differs from the objective.
    """
    begin = time.perf_counter()
    found, notes = legal_settings(provider, cluster, options)
    limit = options.limit(cluster)
    state = BestFirst(Prices(provider, named_blocks(options.pins)), found, options, limit)
    deadline = begin + options.time_limit if options.time_limit is not None else None
    try:
        least = state.run(deadline, progress)
    except KeyboardInterrupt:
        least = state.give_up(_at_once(state, cluster, options))
    if state.best and options.pins.chunks is None and not state.queue_left:
        state.extend(uneven_chunks(found, state.best.mesh, provider))
        least = state.run(deadline, progress)
    notes += _families(state)
    if state.interrupted:
        notes.append("the search was interrupted: this is the best plan until then")
    found_in = time.perf_counter() - begin - state.prices.seconds
    if state.best is None:
        state.prices.check_boundary(options.pins.boundary)
    scores: tuple[RecipeScore, ...] = ()
    explain = explain and not state.interrupted
    if explain and state.best is not None:
        scores = recipes(state.prices, cluster, options, limit)
        if options.pins == options.forced:
            state.best = _not_worse(state.best, scores, proven=not state.queue_left)
    beside: tuple[Neighbour, ...] = ()
    alternatives: Sequence[Choice] = ()
    if explain:
        alternatives = state.other_meshes(options.alternatives)
    if explain and state.best is not None:
        beside = neighbours(state.prices, state.best, cluster, options, limit)
        alternatives = _best_of_meshes(state.best, alternatives, beside)
    given = _result(state, least, notes, scores, alternatives, beside)
    all_in = time.perf_counter() - begin - state.prices.seconds
    return replace(
        given,
        seconds=found_in,
        comparison_seconds=all_in - found_in,
        provider_seconds=state.prices.seconds,
        pins="" if options.pins == options.forced else str(options.pins),
    )


def _at_once(state: BestFirst, cluster: Cluster, options: SearchOptions) -> Choice:
    """The best plain recipe, where the search was interrupted before there was any plan; without
    one that fits, or with pins, which recipes do not follow, the interrupt is passed on."""
    scores: tuple[RecipeScore, ...] = ()
    if options.pins == options.forced and state.best is None:
        scores = recipes(state.prices, cluster, options, state.limit)
    fitting = [s.choice for s in scores if s.fits and s.choice]
    if not fitting:
        raise KeyboardInterrupt
    return min(fitting, key=lambda choice: choice.step_seconds)


def _best_of_meshes(
    best: Choice, alternatives: Sequence[Choice], beside: Sequence[Neighbour]
) -> list[Choice]:
    """The fastest plans that are known of other mesh shapes, as many as there were: a neighbour may
    be faster than what was solved of its mesh."""
    known = {c.mesh.shape: c for c in alternatives}
    for near in beside:
        if near.choice is not None:
            keep_fastest(known, near.choice)
    return fastest_others(known, best.mesh.shape, len(alternatives))


def _with_reason(other: Choice, best: Evaluation) -> Choice:
    """`other` with the time term that it has most more of than the plan, or less where it is
    faster: beside a plan with pins."""
    seen = evaluate(other, other.chain.blocks, other.setting.cluster).time_breakdown
    more = {term: seconds - best.time_breakdown.get(term, 0.0) for term, seconds in seen.items()}
    slower = other.step_seconds >= best.step_seconds
    for term in set(best.time_breakdown) - set(more):
        more[term] = -best.time_breakdown[term]
    term = max(more, key=lambda t: (more[t] if slower else -more[t], t))
    if abs(more[term]) <= TIE * best.step_seconds or (more[term] > 0) != slower:
        return other
    axis, comm, _ = term.partition("_comm")
    name = f"{axis.upper()} communication" if comm else term
    amount = f"{format_seconds(abs(more[term]))} {'more' if slower else 'less'}"
    return replace(other, why=f"{amount} {name}")


def _result(
    state: BestFirst,
    least: float,
    notes: list[str],
    scores: tuple[RecipeScore, ...],
    alternatives: Sequence[Choice],
    beside: Sequence[Neighbour],
) -> SearchResult:
    """Evaluate the plan by the other route and put the proof together."""
    best, status, gap, evaluation = state.best, "infeasible", None, None
    if best is not None:
        gap = max(0.0, (best.step_seconds - least) / best.step_seconds)
        status = "optimal" if gap <= TIE else "feasible"
        evaluation = evaluate(best, best.chain.blocks, best.setting.cluster)
        assert_agrees(best, evaluation)
        alternatives = [_with_reason(c, evaluation) for c in alternatives]
        scores = tuple(
            replace(s, choice=_with_reason(s.choice, evaluation)) if s.choice else s for s in scores
        )
        beside = [
            replace(n, choice=_with_reason(n.choice, evaluation)) if n.choice else n for n in beside
        ]
    meshes = {s.mesh.shape for s in state.settings}
    state.count["considered"] = len(state.settings)
    return SearchResult(
        status=status,
        choice=best,
        evaluation=evaluation,
        bound_step_seconds=least if best is not None else None,
        gap=gap,
        memory_limit=state.limit,
        shapes=len(meshes),
        pruned=len(meshes - state.solved_meshes),
        configurations=dict(sorted(state.count.items())),
        alternatives=tuple(alternatives),
        notes=tuple(notes),
        recipes=scores,
        neighbours=tuple(beside),
    )

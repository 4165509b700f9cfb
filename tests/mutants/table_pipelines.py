"""Mutants of pipelines: schedules, cuts, the loop over ticks, rows, stages over other axes."""

from tests.mutants.mutant import Mutant

VALUES = ("tests/pipeline/test_values.py",)
AXES = ("tests/pipeline/test_axes.py",)
STAGES = ("tests/pipeline/test_stages.py",)
SCHEDULES = ("tests/pipeline/test_schedules.py",)
NO_DERIVATIVE = ("tests/pipeline/test_no_derivative.py",)
VECTORISED = ("tests/pipeline/test_vectorised.py",)
HOME = "meshwise/pipeline/"


def _mutant(name: str, file: str, old: str, new: str, tests: tuple[str, ...]) -> Mutant:
    return Mutant("pipeline", name, f"{HOME}{file}", old, new, tests)


PIPELINES = (
    _mutant(
        "a slot is given out while it is in use",
        "table.py",
        "if end < first",
        "if end <= first",
        SCHEDULES,
    ),
    _mutant(
        "a saved input is counted a tick too short",
        "schedules.py",
        "(a.stage + 1, a.microbatch): tick + 1",
        "(a.stage + 1, a.microbatch): tick + 2",
        SCHEDULES,
    ),
    _mutant(
        "gradients go on instead of back",
        "execute.py",
        "self._sent(back, -1)",
        "self._sent(back, 1)",
        VALUES,
    ),
    _mutant(
        "what is not for this device is kept",
        "execute.py",
        "jnp.where(slot == NONE, old, new)",
        "new",
        VALUES,
    ),
    _mutant(
        "gradients of all chunks are added to the first",
        "execute.py",
        "    if sums.shape[0] == 1:\n",
        "    if sums.shape[0]:\n        return sums.at[0].add(more)\n    if sums.shape[0] == 1:\n",
        VALUES,
    ),
    _mutant(
        "the mean is a sum",
        "execute.py",
        "scale = 1 / self.schedule.microbatches",
        "scale = 1",
        VALUES,
    ),
    _mutant(
        "terms of gradients are not summed",
        "execute.py",
        "over = tuple(a for a in self.deferred if a not in unreduced)",
        "over = ()",
        AXES,
    ),
    _mutant(
        "gradients of tied weights stay apart",
        "call.py",
        "tied = [lax.psum(x, loop.axes) if loop.axes else x for x in parts]",
        "tied = parts",
        VALUES,
    ),
    _mutant(
        "of several rows the first counts",
        "parameters.py",
        "found[leaf] = found[leaf] + more if leaf in found else more",
        "found.setdefault(leaf, more)",
        VALUES,
    ),
    _mutant(
        "equal code on other inputs is one stage",
        "local.py",
        "counts = len(self.params), self.held, self.fed",
        "counts = len(self.params), self.held",
        VALUES,
    ),
    _mutant(
        "stages of one forward are one stage",
        "local.py",
        "        return forward, _jax.structure_key(self.backward), counts\n",
        "        return forward, counts\n",
        VALUES,
    ),
    _mutant(
        "what reads parameters and inputs is computed again",
        "stages.py",
        "found.append(not both and not eqn.effects)",
        "found.append(not eqn.effects)",
        STAGES,
    ),
    _mutant(
        "a number is a term on every device",
        "inner.py",
        "jaxpr = without_literal_results(_jax.without_dead(jaxpr))",
        "jaxpr = _jax.without_dead(jaxpr)",
        VALUES,
    ),
    _mutant(
        "axes of a tile change places",
        "tiles.py",
        "return jnp.transpose(jnp.reshape(array, sizes), [*front, *rest])",
        "return jnp.transpose(jnp.reshape(array, sizes), [*front[::-1], *rest])",
        ("tests/pipeline/test_tiles.py",),
    ),
    _mutant(
        "microbatches come round a tick late",
        "vectorised.py",
        "delay = count - stages if repeat > 1 else 0",
        "delay = count - stages + 1 if repeat > 1 else 0",
        VECTORISED,
    ),
    _mutant(
        "copies of layers are applied",
        "stacking.py",
        "if is_real is None:",
        "if True:",
        VECTORISED,
    ),
    _mutant(
        "bubbles have gradients",
        "bubbles.py",
        "lax.select(used, tangents[0], jnp.zeros_like(tangents[0]))",
        "lax.select(used, tangents[0], tangents[0])",
        NO_DERIVATIVE,
    ),
    _mutant(
        "gradients that are none cross boundaries",
        "local.py",
        "return tuple(first + i in reached for i in range(len(stage.arriving)))",
        "return tuple(map(has_gradient, stage.arriving))",
        NO_DERIVATIVE,
    ),
    _mutant(
        "a branch permutes",
        "inner.py",
        "return without_names(without_permutes(local, mesh.axis_size))",
        "return without_names(local)",
        ("tests/pipeline/test_branches.py",),
    ),
)

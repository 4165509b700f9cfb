"""Run a per-device program on the devices of a mesh.

The program is compiled ahead of time for its shapes: on CPU devices as it is, a replica for each;
on others, and where it calls the host, as `jit(shard_map(...))` with every axis manual. Compiling
ahead means that a call never traces again, whatever mesh is in context, and that arrays of Auto
and Explicit meshes are taken alike. Results come back on the user's mesh.

The call is optimistic: arguments go straight to JAX's own dispatch, which refuses what is not in
its place before anything runs. Only then are the arguments looked at one by one and moved.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from meshwise import _jax
from meshwise.ir.per_device import PerDeviceProgram
from meshwise.ir.sharding import padded_shape
from meshwise.run.empty import cut_empty, is_made_inside, with_made
from meshwise.run.garbage import garbage_later
from meshwise.run.moved import (
    in_type,
    moved,
    refuse_no_devices,
    refuse_other_devices,
    refuse_own_of_each,
)
from meshwise.run.options import Compiling, as_platforms_compile, best_on_cpu
from meshwise.run.padding import cut_end, pad_array, pad_end, positions_of_uneven, structs_of
from meshwise.run.placement import (
    count_processes,
    explicit_sharding,
    in_mesh,
    named_sharding,
    on_whole_axes,
    partition_spec,
    platforms_of,
    refined_jax_mesh,
    without_explicit_type,
)
from meshwise.run.uneven import UnevenArray, wrap, wrapping


class Executable:
    """A per-device program and the devices it runs on; called with the leaves of the arguments.

    `arg_names` are the arguments' paths, for errors; `donated` are the positions of those whose
    buffers the results may reuse; `placements` are the shardings of arguments and results where
    the program's are to be written in other words; `held` are values for the first arguments,
    which calls leave out; `compiling` is what the user said of compiling it.
    """

    def __init__(
        self,
        program: PerDeviceProgram,
        user_mesh: jax.sharding.Mesh | AbstractMesh,
        donated: Sequence[int] = (),
        *,
        name: str = "meshwise",
        arg_names: Sequence[str] | None = None,
        placements: tuple[Sequence[NamedSharding], Sequence[NamedSharding]] | None = None,
        held: Sequence[Any] = (),
        compiling: Compiling | None = None,
    ):
        """Compile nothing yet."""
        mesh = program.mesh
        self.program = program
        self.user_mesh = user_mesh
        self.donated = tuple(donated)
        self.name = name
        self.compiling = compiling or Compiling()
        self.arg_names = arg_names or [f"argument {i}" for i in range(len(program.in_types))]
        ins, outs = placements or (
            [named_sharding(s, mesh, user_mesh) for s in program.in_shardings],
            [named_sharding(s, mesh, user_mesh) for s in program.out_shardings],
        )
        self.in_shardings, self.out_shardings = list(ins), list(outs)
        self._in_padded = [
            padded_shape(t.shape, s, mesh)
            for t, s in zip(program.in_types, program.in_shardings, strict=True)
        ]
        self._uneven_in = positions_of_uneven(program.in_types, self._in_padded)
        self._out_padded = [
            padded_shape(t.shape, s, mesh)
            for t, s in zip(program.out_types, program.out_shardings, strict=True)
        ]
        self._uneven_out = positions_of_uneven(program.out_types, self._out_padded)
        outs = zip(program.out_types, self.out_shardings, strict=True)
        self._empty_out = [
            i for i, (t, s) in enumerate(outs) if 0 in t.shape and not s.is_fully_replicated
        ]
        self._held = [
            x if x.sharding.is_equivalent_to(s, x.ndim) else jax.device_put(x, s)
            for x, s in zip(held, self.in_shardings, strict=False)
        ]

    def __call__(self, args: Sequence[Any]) -> list[Any]:
        """Results of one call: `jax.Array`, or `UnevenArray` where a dim does not divide."""
        call, args = self._call, [*self._held, *args]
        if self.is_of_processes:
            refuse_own_of_each(self.name, self.arg_names, args, self.in_shardings)
            if _jax.looks_for_nans():
                return self._called_unseen(args[len(self._held) :])
        try:
            outs = call(*(self._padded(args) if self._uneven_in else args))
        except _jax.InternalNanError:
            return self._called_unseen(args[len(self._held) :])
        except (TypeError, ValueError):
            # There is no other form of the program than the compiled one.
            if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
                with jax.disable_jit(False):
                    return self(args[len(self._held) :])
            if any(isinstance(a, _jax.Tracer) for a in args):
                return self.as_function()(args)
            placed = self._placed(args)
            if all(new is old for new, old in zip(placed, args, strict=True)):
                raise
            outs = call(*(self._padded(placed) if self._uneven_in else placed))
        if self._is_in_one_mesh:
            outs = [jax.device_put(o, s) for o, s in zip(outs, self.out_shardings, strict=True)]
        for i in self._empty_out:
            outs[i] = cut_empty(outs[i], self.out_shardings[i])
        for i in self._uneven_out:
            uneven = wrap(outs[i], self.program.out_types[i].shape)
            is_keys = jnp.issubdtype(outs[i].dtype, _jax.extended)
            # jax.random takes no objects but JAX's own for keys.
            outs[i] = uneven.value if is_keys else uneven
        return outs

    def _called_unseen(self, args: Sequence[Any]) -> list[Any]:
        """Results of a call that makes a NaN or infinity: no error where padding alone has one.

        Of several processes one may see a NaN alone, and must not call again by itself.
        """
        with jax.debug_nans(False), jax.debug_infs(False):
            outs = self(args)
        _jax.refuse_nans(self.name, [s.data for x in outs for s in x.addressable_shards])
        return outs

    def placed(self, args: Sequence[Any]) -> list[Any]:
        """Arguments, all but those held, brought to where the program wants them."""
        refuse_no_devices(self.name, self.user_mesh)
        placed: list[Any] = []
        for i, arg in enumerate(args, start=len(self._held)):
            sharding = self.in_shardings[i]
            if i in self._uneven_in:
                padded = pad_array(arg, self._in_padded[i], sharding)
                placed.append(UnevenArray(padded, self.program.in_types[i].shape))
            else:
                placed.append(jax.device_put(arg, sharding))
        return placed

    def lower(self) -> Any:
        """JAX's `Lowered` of the program for its shapes (padded where uneven)."""
        refuse_no_devices(self.name, self.user_mesh)
        with self._making():
            return self._traced(self._mapped, 0).lower()

    def lower_for(self, platforms: Any, parameters: Any) -> Any:
        """The same for other platforms, what is held being constants of it.

        What is to be saved takes and returns logical arrays: nobody pads or cuts them there.
        """
        if platforms is None:
            refuse_no_devices(self.name, self.user_mesh)
        is_logical = self.is_uneven and _jax.is_for_export(parameters)
        run = self._of_logical if is_logical else self._mapped

        def without_held(*args: Any) -> list[Any]:
            return run(*self._held, *args)

        without_held.__name__ = self.name
        with self._making():
            function = without_held if self._held or is_logical else run
            traced = self._traced(function, len(self._held), is_logical)
            return _jax.lower_flat(traced, platforms, parameters)

    @contextmanager
    def _making(self) -> Iterator[None]:
        """In here the program is made: no mesh is in context, numbers are as wide as its own."""
        wide = _jax.as_wide_as(self.program.jaxpr)
        with garbage_later(), _jax.without_mesh(), wide, _jax.promoting():
            yield

    def _traced(self, function: Callable[..., Any], first: int, is_logical: bool = False) -> Any:
        """JAX's `Traced` of a function of the padded arguments from the first one on.

        Of logical ones nobody says where those lie that do not divide.
        """
        types, uneven = self.program.in_types, set(self._uneven_in if is_logical else ())
        structs = structs_of(types, [t.shape for t in types] if is_logical else self._in_padded)
        ins, outs = list[Any](self.in_shardings), list[Any](self.out_shardings)
        if self._is_in_one_mesh:
            ins = in_mesh(self._mesh, ins, self.program.in_shardings)
            outs = in_mesh(self._mesh, outs, self.program.out_shardings)
        ins = [None if i in uneven else s for i, s in enumerate(ins)]
        outs = [None if is_logical and i in self._uneven_out else s for i, s in enumerate(outs)]
        jitted = jax.jit(
            function,
            in_shardings=tuple(ins[first:]),
            out_shardings=outs,
            donate_argnums=tuple([i - first for i in {*self.donated} - uneven if i >= first]),
            keep_unused=self.compiling.keep_unused,
            compiler_options=self._compiler_options or None,
        )
        return jitted.trace(*structs[first:])

    def compile(self) -> Any:
        """JAX's `Compiled`, for its cost and memory analysis; compiled once."""
        return self._compiled

    def fast_path(self, args: Sequence[Any], results: Any) -> Any:
        """What `_jax.dispatcher` needs to make the same call from C++, None if it cannot.

        `results` are those of a call with `args`, as a tree. Of uneven arguments C++ takes the
        padded arrays. It cannot where a result without elements is sharded, the program calls back
        to the host, or an argument had to be moved: C++ neither moves nor looks.
        """
        args = [*self._held, *args]
        outs = jax.tree.leaves(results)
        in_place = (
            not (self._empty_out or self._is_in_one_mesh)
            and all(new is old for new, old in zip(self._placed(args), args, strict=True))
            and all(self._is_padded(i, args[i]) for i in self._uneven_in)
            and all(isinstance(outs[i], UnevenArray) for i in self._uneven_out)
        )
        if not in_place:
            return None
        return _jax.fast_path(self._compiled, jax.tree.map(wrapping, results), self._held)

    def as_function(self) -> Callable[[Sequence[Any]], list[Any]]:
        """A function of logical arrays that may be traced: pads, runs on all devices, cuts.

        Results whose dims divide come out sharded as the program leaves them; XLA decides about
        the others. In a trace of an Explicit mesh, results carry its axes in their types.
        """
        refuse_no_devices(self.name, self.user_mesh)

        def function(args: Sequence[Any]) -> list[Any]:
            with _jax.as_wide_as(self.program.jaxpr):
                return run(args)

        def run(args: Sequence[Any]) -> list[Any]:
            values = [jnp.asarray(a) for a in args]
            is_explicit = any(_jax.is_explicit(jax.typeof(v).sharding.mesh) for v in values)
            is_explicit |= _jax.is_explicit(jax.sharding.get_abstract_mesh())
            values = [without_explicit_type(v) for v in values]
            outs = self._of_logical(*values)
            if is_explicit and _jax.is_explicit(self.user_mesh):
                return list(map(jax.sharding.reshard, outs, self.result_types))
            return on_whole_axes(outs, self.program, self.user_mesh)

        function.__name__ = self.name
        return function

    def _of_logical(self, *values: Any) -> list[Any]:
        """Logical results of logical arguments: pads, runs on all devices, cuts."""
        with _jax.with_mesh(self._mesh.abstract_mesh):  # constants made on the way lie on no mesh
            padded = [pad_end(v, p) for v, p in zip(values, self._in_padded, strict=True)]
            outs = zip(self._mapped(*padded), self.program.out_types, strict=True)
            return [cut_end(out, t.shape) for out, t in outs]

    def _padded(self, args: Sequence[Any]) -> list[Any]:
        """The arguments with those of uneven dims in their padded layout."""
        args = list(args)
        for i in self._uneven_in:
            arg, shape, sharding = args[i], self._in_padded[i], self.in_shardings[i]
            if self._is_padded(i, arg):
                args[i] = arg.padded
                continue
            if isinstance(arg, UnevenArray):
                arg = arg.value
            if isinstance(arg, _jax.Tracer):
                return self._placed(args)
            refuse_other_devices(self.name, self.arg_names, args, self._devices)
            args[i] = pad_array(arg, shape, sharding)
        return args

    def _is_padded(self, i: int, arg: Any) -> bool:
        """Whether an argument is held as the program wants it, padding included."""
        held = arg.padded if isinstance(arg, UnevenArray) else None
        shape, sharding = self._in_padded[i], self.in_shardings[i]
        return held is not None and held.shape == shape and held.sharding == sharding

    def _placed(self, args: Sequence[Any]) -> list[Any]:
        """The arguments, those that lie otherwise on the same devices moved to their place."""
        refuse_other_devices(self.name, self.arg_names, args, self._devices)
        given = [in_type(a, t.dtype) for a, t in zip(args, self.program.in_types, strict=True)]
        return [
            arg if i in self._uneven_in else moved(arg, sharding)
            for i, (arg, sharding) in enumerate(zip(given, self.in_shardings, strict=True))
        ]

    @property
    def is_uneven(self) -> bool:
        """Whether arguments or results are padded."""
        return bool(self._uneven_in or self._uneven_out)

    @property
    def is_all_that_calls_run(self) -> bool:
        """Whether what is compiled takes and returns what a call does, padding aside."""
        return not (self._held or self._is_in_one_mesh or (self._empty_out and not self.is_uneven))

    @cached_property
    def _compiler_options(self) -> dict[str, Any]:
        """What the user said, and what is best for the devices where the user said nothing."""
        said = dict(self.compiling.compiler_options)
        return self._best[1] | said

    @cached_property
    def _is_on_cpu(self) -> bool:
        return "cpu" in platforms_of(self.user_mesh)

    @cached_property
    def is_of_processes(self) -> bool:
        """Whether its devices belong to several processes, all of which call it."""
        return count_processes(self._devices) > 1

    @cached_property
    def _devices(self) -> set[Any]:
        return set(self.user_mesh.devices.flat) if isinstance(self.user_mesh, Mesh) else set()

    @cached_property
    def _compiled(self) -> Any:
        is_plain = self._is_on_cpu and not self._made and bool(self.program.mesh.names)
        if not is_plain or not _jax.runs_as_replicas(self._local):
            return self.lower().compile()
        ins = structs_of(self.program.in_types, self._in_padded, self.in_shardings)
        outs = structs_of(self._local.out_avals, self._out_padded, self.out_shardings)
        said = self.arg_names, self.donated, self.compiling.keep_unused, self._compiler_options
        with self._making():
            return _jax.compiled_as_replicas(self._local, self._mesh, self.name, ins, outs, *said)

    @cached_property
    def _call(self) -> Callable[..., list[Any]]:
        return _jax.caller(self._compiled)

    @cached_property
    def _is_in_one_mesh(self) -> bool:
        """Whether JAX lowers the program only where every sharding is of the very same mesh.

        It does so for what calls the host; placements may be of another mesh on the same devices.
        """
        meshes = {s.mesh.abstract_mesh for s in (*self.in_shardings, *self.out_shardings)}
        return meshes != {self._mesh.abstract_mesh} and _jax.asks_for_devices(self.program.jaxpr)

    @cached_property
    def _mesh(self) -> jax.sharding.Mesh:
        return refined_jax_mesh(self.program.mesh, self.user_mesh)

    @cached_property
    def _made(self) -> set[int]:
        """Arguments made inside: XLA refuses a region all of whose arguments have no elements."""
        return {i for i, aval in enumerate(self.program.jaxpr.in_avals) if is_made_inside(aval)}

    @cached_property
    def _best(self) -> tuple[PerDeviceProgram, dict[str, Any]]:
        """The program as it is compiled, and options: on CPU, short collectives travel together."""
        with self._making():
            return best_on_cpu(self.program) if self._is_on_cpu else (self.program, {})

    @cached_property
    def _local(self) -> _jax.ClosedJaxpr:
        """The jaxpr of local arrays as it is compiled."""
        program, _ = self._best
        with self._making():
            local = as_platforms_compile(program, platforms_of(self.user_mesh))
        return with_made(local, self._made, self.program.mesh) if self._made else local

    @cached_property
    def _mapped(self) -> Callable[..., list[Any]]:
        """From padded global arrays to padded global arrays, every axis manual."""
        program, made = self.program, self._made
        if not program.mesh.names:
            run = _jax.jaxpr_as_fun(self._local)
        else:
            ins = [partition_spec(s) for i, s in enumerate(program.in_shardings) if i not in made]
            outs = [partition_spec(s) for s in program.out_shardings]
            run = _jax.mapped(self._local, self._mesh, ins, outs, self.name)

        def mapped(*args: Any) -> list[Any]:
            return list(run(*[a for i, a in enumerate(args) if i not in made]))

        mapped.__name__ = self.name
        return mapped

    @cached_property
    def result_types(self) -> list[NamedSharding]:
        """Where the results lie, as far as types over the user's mesh can say it."""
        return [
            explicit_sharding(s, self.program.mesh, self.user_mesh, t.shape)
            for s, t in zip(self.program.out_shardings, self.program.out_types, strict=True)
        ]

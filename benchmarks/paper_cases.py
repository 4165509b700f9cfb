"""Programs of the sizes of CoCoNeT's evaluation, and schedules of them by moves.

Programs are for meshes without devices; sizes are arguments, and the paper's where nothing is
given. Schedules are named as in the paper: AR an all_reduce, RS a reduce_scatter, AG an all_gather,
MM a product, P2P a send, C the computation that is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh

import meshwise as mw
from examples.coconet.programs import ATTENTION, MLP, attention_block, mlp_block
from meshwise.cost.links import Links, dgx2

Moves = Callable[[mw.Schedule], object]
RATE = 0.1
NODE = 16  # V100 in a DGX-2
NODES = 16
CHUNKS = (2, 4, 8)

BERT = {"336M": 336_000_000, "1.2B": 1_200_000_000, "3.9B": 3_900_000_000}
ROWS = 32_000  # parameters as rows of a matrix: an index of 3.9e9 does not fit 32 bits
# Whole training steps beside PyTorch DDP; those with a ? are unconfirmed.
TRAINING = {
    ("Adam", "336M"): "1.22x",
    ("Adam", "1.2B"): "1.52x",
    ("Adam", "3.9B"): "DDP: no memory",
    ("LAMB", "336M"): "1.20x?",
    ("LAMB", "1.2B"): "1.68x?",
    ("LAMB", "3.9B"): "DDP: no memory",
}
# Tokens of each device in a step: 8192 sequences of 128 with Adam, 65536 with LAMB.
TOKENS = {"Adam": 8192 * 128 // (NODES * NODE), "LAMB": 65536 * 128 // (NODES * NODE)}


@dataclass(frozen=True)
class Way:
    """A schedule by its moves; with `chunks`, one for each number, named with it for the {}."""

    name: str
    moves: Callable[..., Any]
    chunks: tuple[int, ...] = ()

    def made(self) -> list[tuple[str, Moves]]:
        """The schedules, each with its name."""
        if not self.chunks:
            return [(self.name, self.moves)]
        return [(self.name.format(n), self.moves(n)) for n in self.chunks]


@dataclass(frozen=True)
class Case:
    """A program, its machine, and the schedules to compare, the first one the baseline.

    `reported` is what the paper says, and of what.
    """

    name: str
    program: mw.SpmdProgram
    links: Links
    ways: Sequence[Way]
    reported: str


# Data parallel.


def optimizer(kind: str, shape: Sequence[int], devices: int = NODES * NODE) -> mw.SpmdProgram:
    """Adam or LAMB: gradients and new weights in fp16, weights and moments of the step in fp32."""
    mesh = AbstractMesh((devices,), ("data",))

    @mw.program(mesh)
    def step(gradient: mw.Local, weights, mean, square, count):
        gradient = mw.all_reduce(gradient).astype(jnp.float32) / devices
        mean = mw.update(mean, 0.9 * mean + 0.1 * gradient)
        square = mw.update(square, 0.999 * square + 0.001 * gradient**2)
        count = mw.update(count, count + 1)
        length = jnp.sqrt(square / (1 - 0.999**count)) + 1e-6
        update = mean / (1 - 0.9**count) / length
        if kind == "LAMB":
            update = update + 0.01 * weights
            update *= jnp.sqrt(jnp.sum(weights**2)) / jnp.sqrt(jnp.sum(update**2))
        weights = mw.update(weights, weights - RATE * update)
        return weights.astype(jnp.float16), weights, mean, square, count

    state = [_of(shape, jnp.float32)] * 3
    return step.partition(_of((devices, *shape)), *state, _of((), jnp.float32))


def as_it_is(s: mw.Schedule) -> None:
    """No moves: an all_reduce, and then everything on every device."""


def on_slices(s: mw.Schedule, dim: int = 0) -> None:
    """All_reduces in two halves, what reads them between; norms of slices reduced together."""
    _, gathered = s.split(s.find("all_reduce"), dim=dim)
    s.reorder(gathered, more_bytes=True)
    norms = s.find("all_reduce")
    if len(norms) > 1:
        s.bucket(norms)


def state_in_slices(s: mw.Schedule) -> None:
    """The same, and weights and moments are kept in slices."""
    on_slices(s)
    s.slice_state(["weights", "mean", "square"])


def one_fused_all_reduce(s: mw.Schedule) -> None:
    """The same as one kernel."""
    state_in_slices(s)
    s.fuse(s.find())


OPTIMIZERS = (
    Way("AR-C", as_it_is),
    Way("RS-C-AG, state whole", on_slices),
    Way("RS-C-AG, state in slices", state_in_slices),
    Way("fuse(RS-C-AG)", one_fused_all_reduce),
)


def optimizers() -> Iterator[Case]:
    """Adam and LAMB of the three BERTs on 16 nodes, rings over all devices."""
    links = dgx2((), over_all=("data",))
    for (kind, size), reported in TRAINING.items():
        program = optimizer(kind, (ROWS, BERT[size] // ROWS))
        yield Case(f"{kind}, BERT {size}", program, links, OPTIMIZERS, reported)


# Tensor parallel.


def block_end(
    batch: int, contracted: int, tokens: int = 1024, width: int = 3072, devices: int = NODE
) -> mw.SpmdProgram:
    """A product that leaves terms, their sum, bias, dropout, residual; in fp16."""
    mesh = AbstractMesh((devices,), ("model",))

    @mw.program(mesh, layouts={"x": mw.Sliced(2), "w": mw.Sliced(0)})
    def block_end(x, w, bias, residual, key):
        return residual + mw.dropout(key, mw.all_reduce(x @ w) + bias, RATE)

    x, w = _of((batch, tokens, contracted)), _of((contracted, width))
    return block_end.partition(x, w, _of((width,)), _of((batch, tokens, width)), _key())


def tokens_on_slices(s: mw.Schedule) -> None:
    """A sum in two halves, each device with its part of the tokens between them."""
    on_slices(s, dim=1)


def fused_but_product(s: mw.Schedule) -> None:
    """All but the product as one kernel."""
    tokens_on_slices(s)
    s.fuse([h for h in s.find() if h.kind != "dot_general"])


def ring(s: mw.Schedule) -> None:
    """The product in a ring with the reduce_scatter, both ways."""
    tokens_on_slices(s)
    s.overlap(s.find("reduce_scatter")[0], bidirectional=True)


def reduced_in_chunks(chunks: int) -> Moves:
    """The product, the all_reduce and the rest, one part of the batch after the other."""

    def moves(s: mw.Schedule) -> None:
        chain = [s.find("dot_general")[0], s.find("all_reduce")[0], s.find("add")[-1]]
        s.overlap(chain, chunks=chunks, dim=0)

    return moves


def halves_in_chunks(chunks: int) -> Moves:
    """The product, both halves and what is between, one part of the batch after the other."""

    def moves(s: mw.Schedule) -> None:
        tokens_on_slices(s)
        s.overlap([s.find("dot_general")[0], s.find("all_gather")[0]], chunks=chunks, dim=0)

    return moves


def one_kernel(s: mw.Schedule) -> None:
    """All as one kernel, the product too, whose parts are reduced as they are made."""
    tokens_on_slices(s)
    s.fuse(s.find())


BLOCKS = (
    Way("MM-AR-C", as_it_is),
    Way("MM-AR-C in {} chunks", reduced_in_chunks, CHUNKS),
    Way("MM-RS-C-AG", tokens_on_slices),
    Way("MM, fuse(RS-C-AG)", fused_but_product),
    Way("ring(MM-RS), C, AG", ring),
    Way("MM-RS-C-AG in {} chunks", halves_in_chunks, CHUNKS),
    Way("fuse(MM-RS-C-AG)", one_kernel),
)


def blocks() -> Iterator[Case]:
    """The ends of GPT-2 8.3B's attention and MLP on one node."""
    for name, contracted in (("attention", 3072), ("MLP", 4 * 3072)):
        for batch in (8, 16):
            program = block_end(batch, contracted)
            reported = "1.42-1.70x over Megatron-LM, 1.21-1.34x over MM, fuse(RS-C-AG)"
            yield Case(f"{name}, B={batch}", program, dgx2(("model",)), BLOCKS, reported)


# Pipeline parallel.


def stage_end(
    model: int, stages: int = NODES, tokens: int = 2048, width: int = 12288
) -> mw.SpmdProgram:
    """Terms of a sum within a stage, bias, dropout, residual, and the send to the next stage."""
    mesh = AbstractMesh((stages, model), ("stage", "model"))
    each = mw.Local("stage")
    layouts = {"terms": each & mw.Unreduced("sum", "model")}
    layouts |= dict.fromkeys(("bias", "residual", "key"), each)

    @mw.program(mesh, axes="model", layouts=layouts)
    def stage_end(terms, bias, residual, key):
        x = residual + mw.dropout(key, mw.all_reduce(terms) + bias, RATE)
        return mw.send(x, "stage")

    shape = (1, tokens, width)
    terms, residual = _of((stages * model, *shape)), _of((stages, *shape))
    return stage_end.partition(terms, _of((stages, width)), residual, _key(stages))


def stage(
    layers: int,
    model: int = NODE,
    stages: int = NODES,
    tokens: int = 2048,
    heads: int = 96,
    of_head: int = 128,
) -> mw.SpmdProgram:
    """Layers of GPT-3, and the send of what they make to the next stage."""
    mesh = AbstractMesh((stages, model), ("stage", "model"))
    each = mw.Local("stage")
    blocks = ATTENTION, MLP
    laid = jax.tree.map(
        lambda x: x & each, blocks, is_leaf=lambda x: not isinstance(x, dict | tuple)
    )

    @mw.program(mesh, axes="model", layouts={"weights": [laid] * layers, "x": each, "keys": each})
    def stage(weights, x, keys):
        for i, (attention, mlp) in enumerate(weights):
            x = attention_block(attention, x, jax.random.fold_in(keys, 2 * i), RATE)
            x = mlp_block(mlp, x, jax.random.fold_in(keys, 2 * i + 1), RATE)
        return mw.send(x, "stage")

    width = heads * of_head
    attention = dict.fromkeys(("query", "key", "value"), (width, heads, of_head))
    attention |= {"out": (heads, of_head, width), "bias": (width,), "gain": (width,)}
    mlp = {"up": (width, 4 * width), "up_bias": (4 * width,), "down": (4 * width, width)}
    mlp |= {"bias": (width,), "gain": (width,)}
    layer = tuple({n: _of((stages, *shape)) for n, shape in b.items()} for b in (attention, mlp))
    with np.errstate(over="ignore"):  # the mask's -1e9 is minus infinity in fp16
        return stage.partition([layer] * layers, _of((stages, 1, tokens, width)), _key(stages))


def whole_in_chunks(chunks: int) -> Moves:
    """The all_reduce, what follows and the send of the whole, one part after the other."""

    def moves(s: mw.Schedule) -> None:
        s.overlap([s.find("all_reduce")[0], s.find("ppermute")[0]], chunks=chunks)

    return moves


def fused_send(s: mw.Schedule) -> None:
    """Each device's part computed and sent by one kernel."""
    tokens_on_slices(s)
    apart = {"squeeze", "reduce_scatter", "all_gather", "broadcast_in_dim"}
    s.fuse([h for h in s.find() if h.kind not in apart])


def parts_in_chunks(chunks: int) -> Moves:
    """Halves of the sum inside a node beside the send between nodes, part after part."""

    def moves(s: mw.Schedule) -> None:
        tokens_on_slices(s)
        s.overlap([s.find("reduce_scatter")[0], s.find("all_gather")[0]], chunks=chunks)

    return moves


def rings(s: mw.Schedule) -> None:
    """Slices of tokens; every product in a ring with the half of a sum before or after it."""
    tokens_on_slices(s)
    for _ in s.find("reduce_scatter"):
        s.overlap(s.find("reduce_scatter")[0], bidirectional=True)
    for gathered in s.find("all_gather")[:-1]:  # the last one is what the next stage gets
        s.overlap(gathered, bidirectional=True)


SENDS = (
    Way("AR-C-P2P", as_it_is),
    Way("AR-C-P2P in {} chunks", whole_in_chunks, CHUNKS),
    Way("RS-C-P2P-AG", tokens_on_slices),
    Way("RS-fuse(C-P2P)-AG", fused_send),
    Way("RS-C-P2P-AG in {} chunks", parts_in_chunks, CHUNKS),
)
STAGE = (
    Way("MM-AR-C, P2P", as_it_is),
    Way("MM-RS-C-AG, P2P of slices", tokens_on_slices),
    Way("ring(MM-RS), C, ring(AG-MM), P2P of slices", rings),
)


def pipeline() -> Iterator[Case]:
    """GPT-3 175B: the end of a stage by itself, and all layers of one."""
    links = dgx2(("model",), between=("stage",))
    for model in (8, NODE):
        reported = "11.75-12.21x over Megatron-LM"
        yield Case(f"end of a stage, TP {model}", stage_end(model), links, SENDS, reported)
    layers = 96 // NODES
    reported = "1.77x over Megatron-LM, inference end to end"
    yield Case(f"stage of {layers} layers, TP {NODE}", stage(layers), links, STAGE, reported)


SECTIONS: Mapping[str, Callable[[], Iterator[Case]]] = {
    "optimizers": optimizers,
    "blocks": blocks,
    "pipeline": pipeline,
}


def _of(shape: Sequence[int], dtype: Any = jnp.float16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(shape), dtype)


def _key(count: int | None = None) -> Any:
    key = jax.eval_shape(lambda: jax.random.key(0))
    return key if count is None else jax.ShapeDtypeStruct((count,), key.dtype)

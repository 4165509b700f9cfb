"""Products, decompositions, solvers and Fourier transforms."""

from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy.linalg as sl
import numpy as np
from jax import lax

from tests.drop_in.drawing import Call, Dice
from tests.drop_in.tables.numbers import Row, rows

la = jnp.linalg


def _matmul(function: Any) -> Row:
    def row(d: Dice) -> Call:
        batch = d.together(2, d.shape(0, 2))
        n, k, m = d.size(), d.size(), d.size()
        x = d.ordinary((*batch[0], *d.pick((n, k), (n, k), ())[:2]) or (k,), "ffic")
        x = x if x.shape[-1:] == (k,) and x.ndim > 1 else d.ordinary((k,), "fi")
        y = d.ordinary((*batch[1], k, m) if d.flag(0.8) else (k,), "ffic")
        given = (
            {"preferred_element_type": jnp.float32}
            if (d.flag(0.2) and x.dtype.kind != "c" and y.dtype.kind != "c")
            else {}
        )
        return d.call(function, x, y, **given)

    return row


EINSUMS = (
    "ij,jk->ik", "bij,bjk->bik", "ij,ij->", "ij,ij->i", "i,j->ij", "bhqd,bhkd->bhqk", "ii->i",
    "ii->", "ij->ji", "ij->", "ijk->k", "ij,jk,kl->il", "...ij,...jk->...ik", "abc,cd,de->abe",
    "iij->j", "ij,k->ijk", "ab,ab,b->a", "bij,j->bi", "abcd,dc->ab", "ij,kj->ik", "aab,bc->ac",
)  # fmt: skip


def _einsum(d: Dice) -> Call:
    text = d.pick(*EINSUMS)
    sizes = {c: d.pick(1, 2, 3, 4, 5, 8) for c in "abcdehijklqk"}
    dtype = d.dtype("ffic")
    arrays = []
    for term in text.split("->")[0].split(","):
        dims = [sizes[c] for c in term.replace("...", "")]
        arrays.append(d.ordinary((2, 3, *dims) if "..." in term else dims, dtype=dtype))
    return d.call(jnp.einsum, text, *arrays)


def _tensordot(function: Any) -> Row:
    def row(d: Dice) -> Call:
        x = d.ordinary((3, d.pick(4, 5), 6), "fi")
        y = d.ordinary((x.shape[1], 6, 2), "fi")
        return d.pick(
            lambda: d.call(function, x, y, axes=((1, 2), (0, 1))),
            lambda: d.call(function, x, y, axes=((2,), (1,))),
            lambda: d.call(function, x, y, axes=0),
            lambda: d.call(function, x, d.ordinary((6, 3), "f"), axes=1),
        )()

    return row


def _dot_general(d: Dice) -> Call:
    dtype = d.dtype("fic")
    x = d.ordinary((3, 4, 5, 2), dtype=dtype)
    y = d.ordinary((2, 4, 6, 3), dtype=dtype)
    numbers = d.pick((((3,), (0,)), ((0, 1), (3, 1))), (((1,), (1,)), ((), ())),
        (((0, 3), (3, 0)), ((1,), (1,))))  # fmt: skip
    return d.call(lax.dot_general, x, y, numbers)


def _solver(function: Any, kinds: str = "fc", definite: bool = False) -> Row:
    """Of one square matrix, or of a batch of them."""

    def row(d: Dice) -> Call:
        return d.call(function, (d.definite if definite else d.matrix)(d.batch(), None, kinds))

    return row


def _rectangle(function: Any, **given: Any) -> Row:
    def row(d: Dice) -> Call:
        x = d.ordinary((*d.batch(), d.integer(1, 6), d.integer(1, 6)), dtype="float32")
        return d.call(function, x, **given)

    return row


def _solve(function: Any, **given: Any) -> Row:
    def row(d: Dice) -> Call:
        batch = d.batch()
        a = d.matrix(batch)
        b = d.ordinary((*batch, a.shape[-1], d.integer(1, 4)), dtype=a.dtype)
        return d.call(function, a, b, **given)

    return row


def _absolute(function: Any, **given: Any) -> Any:
    """What does not depend on the signs of vectors."""
    return lambda x: jax.tree.map(jnp.abs, function(x, **given))


def _triangular(function: Any) -> Row:
    def row(d: Dice) -> Call:
        a = d.matrix(() if function is sl.solve_triangular else (b := d.batch()))
        batch = () if function is sl.solve_triangular else b
        rhs = d.ordinary((*batch, a.shape[-1], d.integer(1, 4)), dtype=a.dtype)
        if function is sl.solve_triangular:
            return d.call(function, a, rhs, trans=d.pick(0, 1, 2), lower=d.flag())
        return d.call(
            function, a, rhs, left_side=True, lower=d.flag(), transpose_a=d.flag(),
            unit_diagonal=d.flag(0.2),
        )  # fmt: skip

    return row


def _norm(d: Dice) -> Call:
    shape = d.shape(1, 3, 1)
    x = d.ordinary(shape, "ffic")
    if len(shape) > 1 and d.flag(0.3):
        order = d.pick(None, "fro", 1, -1, np.inf, -np.inf, 2, -2, "nuc")
        x = x.astype(np.complex64 if x.dtype.kind == "c" else np.float32)
        return d.call(la.norm, x, ord=order, axis=(0, -1), keepdims=d.flag())
    order = d.pick(None, 0, 1, 2, 3, -1, np.inf, -np.inf)
    return d.call(la.norm, x, ord=order, axis=d.axis(shape), keepdims=d.flag())


def _fft(function: Any, dims: int, kinds: str) -> Row:
    def row(d: Dice) -> Call:
        shape = d.shape(max(dims, 1), 3, 2)
        x = d.ordinary(shape, dtype=_wide(d, kinds))
        norm = d.pick(None, "ortho", "forward", "backward")
        if dims == 1:
            return d.call(
                function, x, n=d.pick(None, None, d.integer(2, 9)), axis=d.axis(shape), norm=norm
            )
        if dims == 2:
            return d.call(function, x, norm=norm)
        axes = d.pick(None, (0,), (-1,), tuple(range(len(shape))))
        return d.call(function, x, axes=axes, norm=norm)

    return row


def _wide(d: Dice, kinds: str) -> Any:
    """A type that transforms take."""
    wide = jax.config.jax_enable_x64 and d.flag()
    return {"f": ("float32", "float64"), "c": ("complex64", "complex128")}[d.pick(*kinds)][wide]


def _window(d: Dice) -> Call:
    """convolve and correlate of one dim."""
    return d.call(
        d.pick(jnp.convolve, jnp.correlate), d.ordinary(d.shape(1, 1, 1), "fi"),
        d.ordinary(d.shape(1, 1, 1), "fi"), mode=d.pick("full", "same", "valid"),
    )  # fmt: skip


MATRICES: dict[str, Row] = {
    **rows("jnp", jnp, "matmul dot", _matmul),
    "jnp.einsum": _einsum,
    "jnp.tensordot": _tensordot(jnp.tensordot),
    "linalg.tensordot": _tensordot(la.tensordot),
    **rows("jnp", jnp, "inner", lambda f: lambda d: d.call(
        f, d.ordinary((3, 4, 5), "ffi"), d.ordinary(d.pick((5,), (2, 5)), "ffi"))),
    **rows("jnp", jnp, "outer kron", lambda f: lambda d: d.call(
        f, d.ordinary(d.shape(1, 2), "fi"), d.ordinary(d.shape(1, 2), "fi"))),
    **rows("jnp", jnp, "vdot", lambda f: lambda d: (lambda s: d.call(
        f, d.ordinary(s, "fic"), d.ordinary(s, "fic")))(d.shape(1, 2))),
    **rows("jnp", jnp, "vecdot", lambda f: lambda d: (lambda s: d.call(
        f, d.ordinary(s, "fc"), d.ordinary(s, "f"), axis=-1))(d.shape(1, 3))),
    **rows("jnp", jnp, "matvec", lambda f: lambda d: d.call(
        f, d.ordinary((2, 5, 3)), d.ordinary((2, 3)))),
    **rows("jnp", jnp, "vecmat", lambda f: lambda d: d.call(
        f, d.ordinary((2, 5)), d.ordinary((2, 5, 3)))),
    "jnp.cross": lambda d: (lambda b: d.call(
        jnp.cross, d.ordinary((*b, 3), "fi"), d.ordinary((*b, 3), "fi")))(d.batch()),
    "jnp.convolve": _window,
    "jnp.correlate": _window,
    **rows("jnp", jnp, "polyadd polysub polymul", lambda f: lambda d: d.call(
        f, d.ordinary(d.shape(1, 1, 1), "f"), d.ordinary(d.shape(1, 1, 1), "f"))),
    "jnp.polydiv": lambda d: d.call(jnp.polydiv, d.ordinary((6,), dtype="float32"),
        d.ordinary((3,), dtype="float32")),
    **rows("jnp", jnp, "polyder polyint", lambda f: lambda d: d.call(
        f, d.ordinary(d.shape(1, 1, 1), "f"), d.integer(0, 2))),
    "jnp.polyfit": lambda d: (lambda x: d.call(
        jnp.polyfit, x, d.ordinary((9,), dtype="float32"), 2))(
            np.linspace(-1, 1, 9, dtype=np.float32)),
    "jnp.poly": lambda d: d.call(jnp.poly, d.ordinary((4,), dtype="float32")),
    "jnp.roots": lambda d: d.call(
        lambda p: jnp.sort_complex(jnp.roots(p, strip_zeros=False)),
        np.float32([1, -6, 11, -6]) * d.integer(1, 3)),
    "lax.dot": lambda d: (lambda t: d.call(
        lax.dot, d.ordinary((5, 6), dtype=t), d.ordinary((6, 3), dtype=t)))(d.dtype("fic")),
    "lax.batch_matmul": lambda d: d.call(
        lax.batch_matmul, d.ordinary((3, 5, 6), dtype="float32"), d.ordinary(
            (3, 6, 2), dtype="float32")),
    "lax.dot_general": _dot_general,
    "lax.ragged_dot": lambda d: d.call(
        lax.ragged_dot, d.ordinary((9, 4), dtype="float32"), d.ordinary((3, 4, 5), dtype="float32"),
        d.pick(np.int32([2, 4, 3]), np.int32([0, 9, 0]), np.int32([1, 2, 3]))),
    **rows("linalg", la, "det inv slogdet", _solver),
    **rows("linalg", la, "cholesky", lambda f: _solver(f, definite=True)),
    **rows("linalg", la, "cond matrix_rank pinv", lambda f: _solver(f, "f")),
    "linalg.cholesky upper": _solver(lambda x: la.cholesky(x, upper=True), definite=True),
    "linalg.eigh": _solver(_absolute(la.eigh), definite=True),
    "linalg.eigvalsh": _solver(la.eigvalsh, definite=True),
    "linalg.eigvals": _solver(lambda x: jnp.sort(jnp.abs(la.eigvals(x)), -1)),
    "linalg.eig": _solver(_absolute(la.eig)),
    "linalg.svd": _rectangle(_absolute(la.svd, full_matrices=False)),
    "linalg.svd full": _rectangle(_absolute(la.svd)),
    "linalg.svdvals": _rectangle(la.svdvals),
    "linalg.qr": _rectangle(_absolute(la.qr)),
    "linalg.qr complete": _rectangle(_absolute(la.qr, mode="complete")),
    "linalg.solve": _solve(la.solve),
    "linalg.lstsq": lambda d: d.call(
        lambda a, b: la.lstsq(a, b)[0], d.ordinary((7, 3), dtype="float32"),
        d.ordinary((7, 2), dtype="float32")),
    "linalg.norm": _norm,
    "linalg.vector_norm": lambda d: (lambda s: d.call(
        la.vector_norm, d.ordinary(s, "fc"), axis=d.axes(s), ord=d.pick(1, 2, np.inf, 0, 3)))(
            d.shape(1, 3, 1)),
    "linalg.matrix_norm": _rectangle(la.matrix_norm),
    "linalg.matrix_power": lambda d: d.call(la.matrix_power, d.matrix(d.batch()), d.integer(-2, 5)),
    "linalg.multi_dot": lambda d: d.call(
        la.multi_dot, [d.ordinary(s) for s in ((3, 5), (5, 2), (2, 7))]),
    **rows("linalg", la, "diagonal trace", lambda f: lambda d: d.call(
        f, d.array(d.shape(2), "fi"), offset=d.integer(-2, 2))),
    **rows("linalg", la, "matmul vecdot", lambda f: lambda d: d.call(
        f, d.ordinary((3, 4, 4)), d.ordinary((3, 4, 4)))),
    "linalg.outer": lambda d: d.call(la.outer, d.ordinary((5,)), d.ordinary((4,))),
    "linalg.cross": lambda d: d.call(la.cross, d.ordinary((5, 3)), d.ordinary((5, 3))),
    "linalg.matrix_transpose": lambda d: d.call(la.matrix_transpose, d.array((3, 4, 5))),
    "linalg.tensorinv": lambda d: d.call(la.tensorinv, d.matrix((), 6).reshape(6, 2, 3), ind=1),
    "linalg.tensorsolve": lambda d: (lambda a: d.call(
        la.tensorsolve, a.reshape(2, 3, 6), d.ordinary((2, 3), dtype=a.dtype)))(d.matrix((), 6)),
    "lax.ragged_dot_general": lambda d: d.call(
        lambda x, y, n: lax.ragged_dot_general(x, y, n, lax.RaggedDotDimensionNumbers(
            (((1,), (1,)), ((), ())), [0], [0])),
        d.ordinary((9, 4), dtype="float32"), d.ordinary((3, 4, 5), dtype="float32"),
        np.int32([2, 4, 3])),
    "lax.fft": lambda d: d.call(
        lax.fft, d.ordinary((4, 6), dtype="complex64"), d.pick("fft", "ifft"), d.pick(
            (6,), (4, 6))),
    "lax.linalg.eig": _solver(lambda x: jnp.sort(jnp.abs(lax.linalg.eig(x)[0]), -1)),
    "lax.linalg.ormqr": lambda d: d.call(
        lambda a, c: lax.linalg.ormqr(*lax.linalg.geqrf(a), c) if hasattr(lax.linalg, "geqrf")
        else c, d.ordinary((5, 3), dtype="float32"), d.ordinary((5, 2), dtype="float32")),
    "lax.linalg.lu": _solver(lax.linalg.lu),
    "lax.linalg.qr": _rectangle(_absolute(lax.linalg.qr, full_matrices=False)),
    "lax.linalg.cholesky": _solver(lax.linalg.cholesky, definite=True),
    "lax.linalg.eigh": _solver(_absolute(lax.linalg.eigh), definite=True),
    "lax.linalg.svd": _rectangle(_absolute(lax.linalg.svd, full_matrices=False)),
    "lax.linalg.schur": lambda d: d.call(_absolute(lax.linalg.schur), d.matrix(d.batch())),
    "lax.linalg.hessenberg": lambda d: d.call(lax.linalg.hessenberg, d.matrix(d.batch(), 4)),
    "lax.linalg.householder_product": lambda d: d.call(
        lambda x: lax.linalg.householder_product(x, jnp.full((*x.shape[:-2], 3), 0.3)),
        d.ordinary((*d.batch(), 5, 3), dtype="float32")),
    "lax.linalg.qdwh": lambda d: d.call(lambda x: lax.linalg.qdwh(x)[:2], d.matrix((), 4, "f")),
    "lax.linalg.tridiagonal": lambda d: d.call(
        lambda x: lax.linalg.tridiagonal(x, lower=True)[1:3], d.definite((), 4)),
    "lax.linalg.tridiagonal_solve": lambda d: (lambda b: d.call(
        lax.linalg.tridiagonal_solve, *[d.array((*b, 6), dtype="float32", low=low, high=low + 1)
        for low in (0, 4, 0)], d.ordinary((*b, 6, 2), dtype="float32")))(d.batch()),
    "lax.linalg.triangular_solve": _triangular(lax.linalg.triangular_solve),
    "lax.linalg.lu_pivots_to_permutation": lambda d: d.call(
        lambda p: lax.linalg.lu_pivots_to_permutation(p, 6),
        (lambda b: np.minimum(d.rng.integers(0, 6, (*b, 4)) + np.arange(4), 5).astype(np.int32))(
            d.batch())),
    "lax.linalg.cholesky_update": lambda d: d.call(
        lax.linalg.cholesky_update, np.linalg.cholesky(d.definite((), 5)).mT.astype(np.float32),
        d.ordinary((5,), dtype="float32")),
    "lax.linalg.symmetric_product": lambda d: d.call(
        lambda a, c: lax.linalg.symmetric_product(a, c, alpha=2.0, beta=0.5),
        d.ordinary((5, 3), dtype="float32"), d.definite((), 5).astype(np.float32)),
    **rows("scipy.linalg", sl, "cholesky", lambda f: _solver(f, definite=True)),
    **rows("scipy.linalg", sl, "det inv expm", lambda f: _solver(
        lambda x: f(x / 8 if f is sl.expm else x))),
    **rows("scipy.linalg", sl, "sqrtm funm_none polar", lambda f: lambda d: d.call(
        f, d.definite((), None))),
    "scipy.linalg.funm": lambda d: d.call(
        lambda x: sl.funm(x, jnp.exp, disp=False)[0], d.definite((), 3, "f") / 9),
    "scipy.linalg.qr_multiply": lambda d: d.call(
        lambda a, c: jnp.abs(sl.qr_multiply(a, c)[0]), d.matrix((), 4, "f"), d.matrix((), 4, "f")),
    "scipy.linalg.rsf2csf": lambda d: d.call(
        _absolute(lambda a: sl.rsf2csf(*sl.schur(a))), d.matrix((), 3, "f")),
    "scipy.linalg.lu": lambda d: d.call(sl.lu, d.matrix((), None, "f")),
    "scipy.linalg.lu_factor": _solver(sl.lu_factor),
    "scipy.linalg.lu_solve": _solve(lambda a, b: sl.lu_solve(sl.lu_factor(a), b)),
    "scipy.linalg.cho_solve": lambda d: (lambda a: d.call(
        lambda a, b: sl.cho_solve(sl.cho_factor(a), b), a,
        d.ordinary((*a.shape[:-1], 2), dtype=a.dtype)))(d.definite(d.batch())),
    "scipy.linalg.cho_factor": _solver(lambda x: jnp.tril(sl.cho_factor(x, lower=True)[0]),
        definite=True),
    "scipy.linalg.solve": _solve(sl.solve),
    "scipy.linalg.solve_triangular": _triangular(sl.solve_triangular),
    "scipy.linalg.qr": lambda d: d.call(_absolute(sl.qr), d.ordinary((5, 4), dtype="float32")),
    "scipy.linalg.svd": lambda d: d.call(_absolute(sl.svd), d.ordinary((5, 4), dtype="float32")),
    "scipy.linalg.eigh": _solver(_absolute(sl.eigh), definite=True),
    "scipy.linalg.eigh_tridiagonal": lambda d: d.call(
        lambda a, b: sl.eigh_tridiagonal(a, b, eigvals_only=True),
        d.ordinary((7,), dtype="float32"), d.ordinary((6,), dtype="float32")),
    "scipy.linalg.expm_frechet": lambda d: d.call(
        sl.expm_frechet, d.matrix((), 3) / 8, d.matrix((), 3).real.astype(np.float32) / 8),
    "scipy.linalg.schur": lambda d: d.call(_absolute(sl.schur), d.matrix((), 4)),
    "scipy.linalg.hessenberg": lambda d: d.call(sl.hessenberg, d.matrix((), 4)),
    "scipy.linalg.solve_sylvester": lambda d: d.call(
        sl.solve_sylvester, d.matrix((), 4, "f"), d.matrix((), 3, "f"),
        d.ordinary((4, 3), dtype="float32")),
    "scipy.linalg.block_diag": lambda d: d.call(
        sl.block_diag, *[d.ordinary(s) for s in ((3, 2), (1, 4), (5, 3))]),
    "scipy.linalg.toeplitz": lambda d: d.call(
        sl.toeplitz, d.ordinary((5,), "fi"), d.ordinary((4,), "fi")),
    **rows("scipy.linalg", sl, "circulant companion fiedler fiedler_companion", lambda f: (
        lambda d: d.call(f, d.array((d.integer(3, 7),), dtype="float32", low=1, high=3)))),
    "scipy.linalg.hankel": lambda d: d.call(sl.hankel, d.ordinary((5,)), d.ordinary((4,))),
    "scipy.linalg.convolution_matrix": lambda d: d.call(
        sl.convolution_matrix, d.ordinary((4,)), 6, mode=d.pick("full", "same", "valid")),
    "scipy.linalg.leslie": lambda d: d.call(sl.leslie, d.ordinary((4,)), d.ordinary((3,))),
    **rows("scipy.linalg", sl, "dft hadamard helmert hilbert invhilbert invpascal pascal",
        lambda f: lambda d: d.call(lambda x: (f(4), x * 2), d.array())),
    **rows("fft", jnp.fft, "fft ifft hfft", lambda f: _fft(f, 1, "fc")),
    **rows("fft", jnp.fft, "irfft", lambda f: _fft(f, 1, "c")),
    **rows("fft", jnp.fft, "rfft ihfft", lambda f: _fft(f, 1, "f")),
    **rows("fft", jnp.fft, "fft2 ifft2", lambda f: _fft(f, 2, "fc")),
    **rows("fft", jnp.fft, "irfft2", lambda f: _fft(f, 2, "c")),
    **rows("fft", jnp.fft, "rfft2", lambda f: _fft(f, 2, "f")),
    **rows("fft", jnp.fft, "fftn ifftn", lambda f: _fft(f, 3, "fc")),
    **rows("fft", jnp.fft, "irfftn", lambda f: _fft(f, 3, "c")),
    **rows("fft", jnp.fft, "rfftn", lambda f: _fft(f, 3, "f")),
}  # fmt: skip

"""jax.scipy: special functions, distributions, signals, images."""

from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy.ndimage as nd
import jax.scipy.optimize as op
import jax.scipy.signal as sg
import jax.scipy.spatial.transform as tf
import jax.scipy.special as sp
import jax.scipy.stats as st
import numpy as np

from tests.drop_in.drawing import Call, Dice
from tests.drop_in.tables.numbers import Row, rows, unary
from tests.drop_in.tables.reductions import reduction


def _several(function: Any, count: int, low: float = 0.2, high: float = 3.0) -> Row:
    """Arrays of one type that broadcast, between bounds."""

    def row(d: Dice) -> Call:
        shapes = d.together(count, d.shape(0, 2))
        arrays = [d.array(s, dtype="float32", low=low, high=high) for s in shapes]
        return d.call(function, *arrays)

    return row


# Of every distribution: how many numbers it takes beside the place, and between which bounds.
DISTRIBUTIONS = {
    "beta": (2, 0.2, 0.9), "cauchy": (2, 0.3, 2), "chi2": (1, 0.3, 3), "expon": (2, 0.3, 2),
    "gamma": (1, 0.3, 3), "gennorm": (1, 0.5, 2), "gumbel_l": (2, 0.5, 2), "gumbel_r": (2, 0.5, 2),
    "laplace": (2, 0.3, 2), "logistic": (2, 0.3, 2), "norm": (2, 0.3, 2), "pareto": (1, 1.1, 3),
    "t": (1, 0.5, 3), "uniform": (2, 0.1, 2), "vonmises": (1, 0.3, 2), "wrapcauchy": (1, 0.2, 0.8),
    "bernoulli": (1, 0.1, 0.9), "geom": (1, 0.1, 0.9), "poisson": (1, 0.5, 4),
    "nbinom": (2, 0.2, 0.9), "binom": (2, 0.1, 0.9), "betabinom": (3, 0.5, 2),
    "truncnorm": (2, 0.5, 2),
}  # fmt: skip
DISCRETE = ("bernoulli", "geom", "poisson", "nbinom", "binom", "betabinom")
QUANTITIES = ("pdf", "logpdf", "cdf", "logcdf", "sf", "logsf", "pmf", "logpmf")


def _distribution(name: str, quantity: str) -> Row:
    count, low, high = DISTRIBUTIONS[name]
    function = getattr(getattr(st, name), quantity)

    def row(d: Dice) -> Call:
        shapes = d.together(count + 1, d.shape(0, 2))
        x = d.array(shapes[0], dtype="float32", low=low, high=high)
        if name in DISCRETE:
            x = d.array(shapes[0], dtype="int32", low=0, high=4)
        if quantity in ("ppf", "isf"):
            x = d.array(shapes[0], dtype="float32", low=0.05, high=0.95)
        others = [d.array(s, dtype="float32", low=low, high=high) for s in shapes[1:]]
        if name == "truncnorm":
            others = [-others[0], others[1]]
        return d.call(function, x, *others)

    return row


def _convolved(function: Any, dims: int) -> Row:
    def row(d: Dice) -> Call:
        first = [d.integer(3, 9) for _ in range(dims)]
        second = [d.integer(1, 3) for _ in range(dims)]
        mode = d.pick("full", "same", "valid")
        return d.call(
            function, d.ordinary(first, dtype="float32"), d.ordinary(second, dtype="float32"),
            mode=mode,
        )  # fmt: skip

    return row


def _signal(function: Any, **given: Any) -> Row:
    def row(d: Dice) -> Call:
        x = d.ordinary((*d.batch(), d.pick(16, 24, 30)), dtype="float32")
        return d.call(lambda x: function(x, **given), x)

    return row


def _coordinates(d: Dice) -> Call:
    order, mode = d.pick(0, 1), d.pick("constant", "nearest", "wrap", "mirror", "reflect")
    shape = d.shape(0, 2)
    return d.call(
        lambda x, i, j: nd.map_coordinates(x, [i, j], order=order, mode=mode, cval=2.0),
        d.ordinary((5, 7), dtype="float32"),
        d.array(shape, dtype="float32", low=-2, high=7),
        d.array(shape, dtype="float32", low=-2, high=7),
    )


SPECIAL: dict[str, Row] = {
    **rows("special", sp, (
        "dawsn digamma entr erf erfc erfcx expit gammaln gammasgn i0 i0e i1 i1e log_ndtr logit"
        " loggamma ndtr spence exp1 expi gamma sici fresnel wofz"
    ), lambda f: unary(f, "f", low=0.1, high=3)),
    **rows("special", sp, "erfinv ndtri", lambda f: unary(f, "f", low=0.05, high=0.95)),
    **rows("special", sp, (
        "beta betaln gammainc gammaincc kl_div rel_entr xlog1py xlogy zeta poch owens_t comb"
    ), lambda f: _several(f, 2, 1.1 if f is sp.zeta else 0.2)),
    **rows("special", sp, "boxcox boxcox1p", lambda f: _several(f, 2)),
    "special.betainc": _several(sp.betainc, 3, 0.2, 0.9),
    "special.hyp1f1": _several(sp.hyp1f1, 3, 0.5, 1.5),
    "special.hyp2f1": _several(sp.hyp2f1, 4, 0.1, 0.6),
    "special.factorial": unary(sp.factorial, "i", low=0, high=6),
    "special.polygamma": lambda d: (lambda s: d.call(
        sp.polygamma, d.array(s, dtype="int32", low=0, high=2),
        d.array(s, dtype="float32", low=0.5, high=3)))(d.shape(0, 2)),
    "special.multigammaln": lambda d: d.call(
        lambda x: sp.multigammaln(x, 2), d.array(dtype="float32", low=2, high=5)),
    "special.expn": lambda d: (lambda s: d.call(
        sp.expn, d.array(s, dtype="int32", low=1, high=4),
        d.array(s, dtype="float32", low=0.3, high=4)))(d.shape(0, 2)),
    "special.bernoulli": lambda d: d.call(lambda x: (sp.bernoulli(5), x), d.array()),
    "special.bessel_jn": lambda d: d.call(
        lambda z: sp.bessel_jn(z, v=2, n_iter=20), d.array((5,), dtype="float32", low=0.5, high=4)),
    "special.sph_harm_y": lambda d: d.call(
        lambda t, p: sp.sph_harm_y(jnp.array([1, 2]), jnp.array([0, 1]), t, p, n_max=3),
        d.array((2,), dtype="float32", low=0.1, high=3),
        d.array((2,), dtype="float32", low=0.1, high=3)),
    **rows("special", sp, "logsumexp softmax log_softmax", lambda f: reduction(
        f, "f", least=1, keepdims=f is sp.logsumexp)),
    **{f"stats.{name}.{quantity}": _distribution(name, quantity)
       for name in DISTRIBUTIONS for quantity in QUANTITIES
       if hasattr(getattr(st, name), quantity)},
    **{f"stats.{name}.{q}": _distribution(name, q) for name, q in (
        ("cauchy", "ppf"), ("cauchy", "isf"), ("expon", "ppf"), ("logistic", "ppf"),
        ("logistic", "isf"), ("norm", "ppf"), ("norm", "isf"), ("pareto", "ppf"),
        ("gumbel_l", "ppf"), ("gumbel_r", "ppf"), ("bernoulli", "ppf"), ("uniform", "ppf"))},
    "stats.dirichlet.logpdf": lambda d: d.call(
        st.dirichlet.logpdf, np.float32([0.2, 0.3, 0.5]),
        d.array((3,), dtype="float32", low=0.5, high=2)),
    "stats.multinomial.logpmf": lambda d: d.call(
        lambda x, p: st.multinomial.logpmf(x, 5, p / p.sum()), np.int32([1, 2, 2]),
        d.array((3,), dtype="float32", low=0.5, high=2)),
    "stats.multivariate_normal.logpdf": lambda d: (lambda a: d.call(
        st.multivariate_normal.logpdf, d.ordinary((5, 4), dtype=a.dtype), d.ordinary(
            (4,), dtype=a.dtype), a))(d.definite((), 4, "f")),
    "stats.gaussian_kde": lambda d: d.call(
        lambda x, y: st.gaussian_kde(x)(y), d.ordinary((2, 9), dtype="float32"),
        d.ordinary((2, 5), dtype="float32")),
    "stats.mode": lambda d: (lambda s: d.call(
        st.mode, d.array(s, "i"), axis=d.pick(None, d.axis(s)), keepdims=d.flag()))(
            d.shape(1, 3, 1)),
    "stats.rankdata": lambda d: (lambda s: d.call(
        st.rankdata, d.array(s, "i"), axis=d.pick(None, d.axis(s)),
        method=d.pick("average", "min", "max", "dense", "ordinal")))(d.shape(1, 2, 1)),
    "stats.sem": lambda d: (lambda s: d.call(
        st.sem, d.ordinary(s, dtype="float32"), axis=d.axis(s)))(d.shape(1, 3, 2)),
    "signal.convolve": lambda d: _convolved(sg.convolve, d.integer(1, 2))(d),
    "signal.correlate": lambda d: _convolved(sg.correlate, d.integer(1, 2))(d),
    "signal.fftconvolve": lambda d: _convolved(sg.fftconvolve, d.integer(1, 2))(d),
    "signal.convolve2d": _convolved(sg.convolve2d, 2),
    "signal.correlate2d": _convolved(sg.correlate2d, 2),
    "signal.detrend": lambda d: (lambda s: d.call(
        sg.detrend, d.ordinary(s, dtype="float32"), axis=d.axis(s), type=d.pick(
            "linear", "constant")))(d.shape(1, 3, 2)),
    "signal.stft": _signal(sg.stft, nperseg=8),
    "signal.istft": lambda d: d.call(
        lambda x: sg.istft(x, nperseg=8), d.ordinary((5, 6), dtype="complex64")),
    "signal.welch": _signal(sg.welch, nperseg=8),
    "signal.csd": lambda d: d.call(
        lambda x, y: sg.csd(x, y, nperseg=8), d.ordinary((2, 24), dtype="float32"), d.ordinary(
            (2, 24), dtype="float32")),
    "ndimage.map_coordinates": _coordinates,
    **rows("scipy.fft", jax.scipy.fft, "dct idct", lambda f: lambda d: (lambda s: d.call(
        f, d.ordinary(s, dtype="float32"), axis=d.axis(s), norm=d.pick(None, "ortho")))(
            d.shape(1, 3, 2))),
    **rows("scipy.fft", jax.scipy.fft, "dctn idctn", lambda f: lambda d: d.call(
        f, d.ordinary(d.shape(1, 3, 2), dtype="float32"), norm=d.pick(None, "ortho"))),
    "scipy.integrate.trapezoid": lambda d: d.call(
        jax.scipy.integrate.trapezoid, d.ordinary(d.shape(1, 3, 1))),
    "scipy.cluster.vq.vq": lambda d: d.call(
        jax.scipy.cluster.vq.vq, d.ordinary((9, 3), dtype="float32"), d.ordinary(
            (4, 3), dtype="float32")),
    "scipy.interpolate.RegularGridInterpolator": lambda d: d.call(
        lambda v, x: jax.scipy.interpolate.RegularGridInterpolator(
            (jnp.arange(5.0), jnp.arange(4.0)), v, bounds_error=False, fill_value=0.0)(x),
        d.ordinary((5, 4), dtype="float32"), d.array((7, 2), dtype="float32", low=-1, high=5)),
    "scipy.spatial.Rotation": lambda d: d.call(
        lambda v, x: tf.Rotation.from_rotvec(v).apply(x),
        d.ordinary((5, 3), dtype="float32"), d.ordinary((5, 3), dtype="float32")),
    **rows("scipy.sparse.linalg", jax.scipy.sparse.linalg, "cg bicgstab gmres", lambda f: (
        lambda d: d.call(lambda a, b: f(a, b, tol=1e-6)[0], d.definite((), 5).astype(np.float32),
            d.ordinary((5,), dtype="float32")))),
    "scipy.optimize.minimize": lambda d: d.call(
        lambda x: op.minimize(
            lambda v: ((v - 1) ** 2).sum(), x, method="BFGS").x, d.ordinary((4,), dtype="float32")),
}  # fmt: skip

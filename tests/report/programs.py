"""Programs whose reports are compared with golden text: keep the lines where they are."""

import jax
from jax import lax
from jax.extend.core import Primitive
from jax.sharding import PartitionSpec as P

# Gradients are made of the same equations in jax 0.10 and 0.11 (those of tanh are not).
# Without a rule, now and later.
smooth_p = Primitive("smooth")
smooth_p.def_impl(jax.device_get)
smooth_p.def_abstract_eval(lambda x: x)


def megatron_mlp(x, up, down):
    hidden = jax.nn.relu(x @ up)
    return x + hidden @ down


def loss_of_rows(weights, rows, labels):
    scores = jax.nn.sigmoid(rows @ weights)
    return ((scores - labels) ** 2).mean()


def gradient_of_rows(weights, rows, labels):
    return jax.grad(loss_of_rows)(weights, rows, labels)


def with_unknown(x):
    x = lax.with_sharding_constraint(x * 2.0, P("x", None))
    return smooth_p.bind(x) + 1.0


def with_open_hint(x, y):
    x = lax.with_sharding_constraint(x, P(P.UNCONSTRAINED, "y"))
    return x @ y


def loss_of_products(first, second, x):
    return ((jax.nn.sigmoid(x @ first) @ second) ** 2).mean()


gradient_of_products = jax.grad(loss_of_products, (0, 1))


def elementwise(tree):
    return {"moved": tree["here"] * 2.0, "kept": tree["there"] + 1.0}

"""How JAX draws from a distribution that is one primitive. Private."""

from functools import partial
from typing import Any

import jax
from jax import lax
from jax._src.random import core as _random


def gamma_of_keys(keys: Any, alphas: Any, log_space: bool) -> Any:
    """A gamma variate for each pair of a key and a parameter, as `random_gamma` draws them."""
    shape = alphas.shape
    draw = jax.vmap(partial(_random._gamma_one, log_space=log_space))
    return lax.reshape(draw(keys.reshape(-1), lax.reshape(alphas, (alphas.size,))), shape)

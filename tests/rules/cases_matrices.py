"""Linear algebra, random numbers."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src.lax import linalg
from jax._src.random.prng import iota_2x32_shape_p

from tests.rules.case import Case


def solve(**options):
    return lambda a, b: lax.linalg.triangular_solve(a, b, **options)


LINEAR = [
    Case("cholesky", "cholesky", lambda x: lax.linalg.cholesky(x, symmetrize_input=False),
         "f32[5,4,4]s", "i j k -> i l m | whole=j k l m"),
    Case("qr", "qr", lax.linalg.qr, "f32[5,4,3]",
         "i j k -> i l m, i n o | whole=j k l m n o"),
    Case("geqrf", "geqrf", linalg.geqrf, "f32[5,4,3]", "i j k -> i l m, i n | whole=j k l m n"),
    Case("geqp3", "geqp3", lambda x: linalg.geqp3(x, jnp.zeros((5, 3), np.int32)),
         "f32[5,4,3]", "i j k, i l -> i m n, i o, i p | whole=j k l m n o p"),
    Case("householder_product", "householder_product", lax.linalg.householder_product,
         "f32[5,4,3] f32[5,3]", "i j k, i l -> i m n | whole=j k l m n"),
    Case("ormqr", "ormqr", lax.linalg.ormqr,
         "f32[5,4,3] f32[5,3] f32[5,4,2]", "i j k, i l, i m n -> i o p | whole=j k l m n o p"),
    Case("svd", "svd", lambda x: lax.linalg.svd(x, full_matrices=False), "f32[5,4,3]",
         "i j k -> i l, i m n, i o p | whole=j k l m n o p"),
    Case("eigh", "eigh", lax.linalg.eigh, "f32[5,4,4]s",
         "i j k -> i l m, i n | whole=j k l m n"),
    Case("eig", "eig", lax.linalg.eig, "f32[5,4,4]",
         "i j k -> i l, i m n, i o p | whole=j k l m n o p"),
    Case("lu", "lu", lax.linalg.lu, "f32[5,4,4]", "i j k -> i l m, i n, i o | whole=j k l m n o"),
    Case("lu_pivots_to_permutation", "lu_pivots_to_permutation",
         lambda p: lax.linalg.lu_pivots_to_permutation(p, 4), "i32[5,4]<4",
         "i j -> i k | whole=j k"),
    Case("schur", "schur", lax.linalg.schur, "f32[5,4,4]",
         "i j k -> i l m, i n o | whole=j k l m n o"),
    Case("hessenberg", "hessenberg", lax.linalg.hessenberg, "f32[5,4,4]",
         "i j k -> i l m, i n | whole=j k l m n"),
    Case("tridiagonal", "tridiagonal", lax.linalg.tridiagonal, "f32[5,4,4]s",
         "i j k -> i l m, i n, i o, i p | whole=j k l m n o p"),
    Case("tridiagonal_solve", "tridiagonal_solve", lax.linalg.tridiagonal_solve,
         "f32[5,6]u f32[5,6]+ f32[5,6]u f32[5,6,4]",
         "i j, i k, i l, i m n -> i o n | whole=j k l m o"),
    Case("symmetric_product", "symmetric_product",
         lax.linalg.symmetric_product, "f32[5,4,3] f32[5,4,4]s",
         "i j k, i l m -> i n o | whole=j k l m n o",
         timid="k: only where the second operand is not added"),
    Case("triangular_solve", "triangular_solve", solve(left_side=True), "f32[5,4,4]s f32[5,4,7]",
         "i j k, i l m -> i n m | whole=j k l n"),
    Case("triangular_solve on the right", "triangular_solve", solve(left_side=False),
         "f32[5,4,4]s f32[5,7,4]", "i j k, i l m -> i l n | whole=j k m n"),
    Case("triangular_solve of one", "triangular_solve", solve(left_side=True, lower=True),
         "f32[4,4]s f32[4,1]", "i j, k 1 -> l 1 | whole=i j k l"),
]  # fmt: skip

RANDOM = [
    Case("random_bits", "random_bits", lambda k: jax.random.bits(k, (5, 6)), "key[]", " -> i j"),
    Case("random_bits of a byte", "random_bits",
         lambda k: jax.random.bits(k, (7, 3), "uint8"), "key[]", " -> i j"),
    Case("random_bits of two bytes", "random_bits",
         lambda k: jax.random.bits(k, (7, 3), "uint16"), "key[]", " -> i j"),
    Case("random_bits of many keys", "random_bits", jax.vmap(lambda k: jax.random.bits(k, (6,))),
         "key[5]", "i -> i j"),
    Case("random_bits of a scalar", "random_bits", lambda k: jax.random.bits(k, ()), "key[]",
         " -> "),
    Case("random_bits of another generator", "random_bits", lambda k: jax.random.bits(k, (6,)),
         "rbg[]", " -> i | whole=i"),
    Case("random_split", "random_split", lambda k: jax.random.split(k, 5), "key[]", " -> i"),
    Case("random_split of many keys", "random_split",
         jax.vmap(lambda k: jax.random.split(k, (2, 3))), "key[5]", "i -> i j k"),
    Case("random_split of another generator", "random_split", lambda k: jax.random.split(k, 6),
         "rbg[]", " -> i | whole=i"),
    Case("random_fold_in", "random_fold_in", jax.vmap(jax.random.fold_in, (0, 0)),
         "key[5] u32[5]", "i, i -> i"),
    Case("random_fold_in of many numbers", "random_fold_in",
         jax.vmap(jax.random.fold_in, (None, 0)), "key[] u32[5]", ", i -> i"),
    Case("random_fold_in of another generator", "random_fold_in",
         jax.vmap(jax.random.fold_in, (0, 0)), "rbg[5] u32[5]", "i, i -> i"),
    Case("random_seed", "random_seed", jax.vmap(jax.random.key), "u32[5]", "i -> i"),
    Case("random_wrap", "random_wrap", jax.random.wrap_key_data, "u32[5,2]", "i j -> i | whole=j"),
    Case("random_unwrap", "random_unwrap", jax.random.key_data, "key[5]", "i -> i j | whole=j"),
    Case("random_clone", "random_clone", jax.random.clone, "key[5]", "i -> i"),
    Case("random_gamma", "random_gamma", jax.random.gamma, "key[] f32[5]+", ", i -> i"),
    Case("random_gamma of many keys", "random_gamma", jax.vmap(jax.random.gamma),
         "key[5] f32[5,2]+", "i, i j -> i j"),
    Case("rng_bit_generator", "rng_bit_generator",
         lambda k: lax.rng_bit_generator(k, (5, 6)), "u32[4]", "i -> j, k l | whole=i j k l"),
    Case("iota_2x32_shape", "iota_2x32_shape",
         lambda: iota_2x32_shape_p.bind(shape=(5, 6)), "", " -> i j, i j"),
]  # fmt: skip

CASES = [*LINEAR, *RANDOM]

"""Which operators a program is made of, with how often each comes."""

from tests.fuzz import operators_matrices as matrices
from tests.fuzz import operators_numbers as numbers
from tests.fuzz import operators_places as places
from tests.fuzz import operators_windows as windows
from tests.fuzz.making import Profile

OPERATORS = Profile(numbers.NUMBERS + places.PLACES, gradients=0.35)

# What exchanges rows with neighbours or with all: windows, shifts, orders, and what feeds them.
EXCHANGES = Profile(
    (
        *windows.WINDOWS,
        *matrices.MATRICES,
        (4, numbers.unary),
        (5, numbers.binary),
        (3, numbers.reduction),
        (3, numbers.product),
        (2, numbers.along_a_dim),
        (2, numbers.normalisation),
        (4, places.reshape),
        (3, places.transpose),
        (4, places.slices),
        (3, places.joins),
        (3, places.gather),
        (3, places.scatter),
        (1, places.made_of_nothing),
        (6, places.hint),
    ),
    gradients=0.35,
)
EVERYTHING = Profile(
    numbers.NUMBERS + places.PLACES + windows.WINDOWS + matrices.MATRICES, gradients=0.3
)

# What a training step has: long chains of products, norms and sums, and their gradients.
NETWORK = Profile(
    (
        (4, numbers.unary),
        (6, numbers.binary),
        (1, numbers.transposed_sum),
        (1, numbers.select),
        (7, numbers.product),
        (9, numbers.matrix_product),
        (5, numbers.reduction),
        (7, numbers.normalisation),
        (1, numbers.exact_reduction),
        (1, numbers.along_a_dim),
        (4, places.reshape),
        (3, places.transpose),
        (2, places.ones),
        (1, places.slices),
        (1, places.joins),
        (2, places.gather),
        (1, places.scatter),
        (2, places.made_of_nothing),
        (2, places.random_numbers),
        (6, places.hint),
        (4, places.call),
    ),
    gradients=0.9,
)

PROFILES = (EVERYTHING, EXCHANGES, NETWORK, EXCHANGES, OPERATORS)

OPERATORS_BY_NAME = {f.__name__: f for profile in PROFILES for _, f in profile.operators}

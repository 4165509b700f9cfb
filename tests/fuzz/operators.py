"""Which operators a program is made of, with how often each comes."""

from tests.fuzz import operators_control as control
from tests.fuzz import operators_matrices as matrices
from tests.fuzz import operators_numbers as numbers
from tests.fuzz import operators_places as places
from tests.fuzz import operators_windows as windows
from tests.fuzz.making import Operator, Operators, Profile

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

_INSIDE = (
    (6, numbers.unary),
    (7, numbers.binary),
    (1, numbers.integer_arithmetic),
    (1, numbers.boolean_arithmetic),
    (1, numbers.select),
    (5, numbers.product),
    (4, numbers.matrix_product),
    (5, numbers.reduction),
    (2, numbers.along_a_dim),
    (2, numbers.normalisation),
    (3, places.reshape),
    (3, places.transpose),
    (1, places.ones),
    (2, places.slices),
    (2, places.joins),
    (3, places.gather),
    (3, places.scatter),
    (2, places.made_of_nothing),
    (3, places.random_numbers),
    (4, places.hint),
    (2, places.call),
    (4, control.at_a_step),
    *((1, operator) for _, operator in (*windows.WINDOWS, *matrices.MATRICES)),
)


def _many(operators: Operators, times: int) -> Operators:
    return tuple((n * times, operator) for n, operator in operators)


# Loops and branches, in each other too; those that end when their data says so have no gradient.
CONTROL = Profile(
    (*_INSIDE, *_many(control.LOOPS, 4)), gradients=0.5, inside=(*_INSIDE, *control.LOOPS)
)
UNTIL = Profile(
    (*_INSIDE, *_many(control.LOOPS, 2), *_many(control.WHILES, 6)),
    gradients=0.0,
    inside=(*_INSIDE, *control.LOOPS, *control.WHILES),
)

PROFILES = (EVERYTHING, EXCHANGES, NETWORK, EXCHANGES, OPERATORS, CONTROL, UNTIL)


def _alone(operator: Operator) -> Profile:
    """Programs of one operator, once or a few times."""
    has_gradient = operator not in {found for _, found in control.WHILES}
    return Profile(((1, operator),), 0.25 if has_gradient else 0.0, _INSIDE)


PROFILES_BY_NAME = {f.__name__: _alone(f) for profile in PROFILES for _, f in profile.operators}

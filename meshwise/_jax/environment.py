"""What a jaxpr's atoms stand for while its equations are run one by one."""

from collections.abc import Mapping
from typing import Any

from meshwise._jax.jaxprs import Literal, literal_value


def value_in(env: Mapping[Any, Any], atom: Any) -> Any:
    """The value of a variable, as an environment has it, or of a literal."""
    return literal_value(atom) if isinstance(atom, Literal) else env[atom]

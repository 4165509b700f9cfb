"""Guards: tests of the source text itself, in place of good intentions.

Each guard is a function from modules to a list of offences. It is run on the package, where the
list must be empty, and on planted offences, where it must not: a guard that cannot fail guards
nothing.
"""

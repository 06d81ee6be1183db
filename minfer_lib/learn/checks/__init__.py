"""The checks of the exercises, one module a chapter (`ch01` ...): `check_...(your_function) -> bool`.

Invariant: a module lists its exercises in `EXERCISES`; each of them has at least one typical mistake with a hint.
"""

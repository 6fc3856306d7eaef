"""Run one test for many values, which is cheaper than a test for each value."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any


def each(names: str | tuple[str, ...], values: Iterable[Any]) -> Callable[..., Any]:
    """Call the test once for each value, as `pytest.mark.parametrize` would, within one test.

    Raises:
        ExceptionGroup: The errors of all values that failed; each has a note that names its value.
    """
    if isinstance(names, str):
        names, values = (names,), [(value,) for value in values]
    cases = [dict(zip(names, value, strict=True)) for value in values]

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**others: Any) -> None:
            errors = []
            for case in cases:
                try:
                    test(**others, **case)
                except Exception as error:
                    error.add_note(", ".join(f"{name} = {value}" for name, value in case.items()))
                    errors.append(error)
            if errors:
                raise ExceptionGroup(f"{len(errors)} of {len(cases)} values", errors)

        signature = inspect.signature(test)
        left = [p for p in signature.parameters.values() if p.name not in names]
        run.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
        return run

    return decorate

"""Marks a function that compiled code may call; it stays Python for Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from numba.extending import register_jitable

Function = TypeVar("Function", bound=Callable[..., Any])
compilable: Callable[[Function], Function] = register_jitable
